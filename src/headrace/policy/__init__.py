"""Primitives for a training loop that a user writes: one process with an engine that samples and a learner that trains.

    prompts ──sample──▶ Engine, in a thread ──samples──▶ your rewards ──advantages──▶ forward_backward, repeatedly
                          ▲                                                             │ gradient, added up
                          │ slots.py: copy, stage, commit between two steps             ▼
                          └───────────────────────── publish ◀───────────────────── optim_step: version + 1

The gradients of all calls of ``forward_backward`` since the last ``optim_step`` are added. Each of them is divided by
the denominator of its own call.
"""

from headrace.base.types.messages.engine import StaleFork
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.learner.core import Update
from headrace.learner.work import Gradient
from headrace.policy.config import PolicyConfig
from headrace.policy.policy import Policy
from headrace.policy.sample import Sample

__all__ = ["Gradient", "Interrupt", "Policy", "PolicyConfig", "Sample", "StaleFork", "Tokens", "Update"]
