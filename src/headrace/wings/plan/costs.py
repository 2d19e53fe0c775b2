"""What things cost in seconds: a step of an engine, of the learner, and what lies between them. Pure functions.

An engine decodes all sequences of its batch in steps, one token of each. Of its curves the first is physics, the second
a rule of thumb, the others are measured:

    Roofline   step(B, C) = max[(W + C·kv) / bandwidth, 2·P·B / flops] + t0       C: tokens in the cache, all sequences
    Constant   step(B)    = B / rate                                              whatever the batch
    Table      step(B)    = B / rate(B), between the points of a table
    Linear     step(B, C) = a + b·B + c·C                                         what a calibration fits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.base.types.weights import Interrupt


class EngineCost(Protocol):
    """The curve of one engine."""

    def step_s(self, num: int, context: float) -> float:
        """Seconds for one token of each of ``num`` sequences that have ``context`` tokens in the cache together."""
        ...

    def prefill_s(self, tokens: float) -> float:
        """Seconds to read that many tokens of prompts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What memory and arithmetic allow (Pope et al. 2022; Williams et al. 2009)."""

    weight_bytes: float
    """Read in every step: all that is no expert."""
    expert_bytes: float = 0.0
    """Of all experts; a step reads those that one of its tokens was sent to."""
    expert_share: float = 1.0
    """Of the experts, those that one token is sent to."""
    kv_bytes: float
    """Of one token in the cache."""
    flop_per_token: float
    """2 · active parameters."""
    bandwidth: float
    """Bytes/s that are reached."""
    flops: float
    """FLOP/s that are reached."""
    overhead_s: float = 0.0
    """t0 of every step: launches, sampling, scheduling."""

    def step_s(self, num: int, context: float) -> float:
        read = self.weight_bytes + context * self.kv_bytes
        if self.expert_bytes:
            read += self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** num)
        return max(read / self.bandwidth, num * self.flop_per_token / self.flops) + self.overhead_s

    def prefill_s(self, tokens: float) -> float:
        return tokens * self.flop_per_token / self.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantRate:
    """So many tokens a second, however many sequences there are; prompts are free."""

    tok_s: float

    def step_s(self, num: int, context: float) -> float:
        return num / self.tok_s

    def prefill_s(self, tokens: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTable:
    """Throughput that was measured at some batch sizes; straight lines between them, from 0 at no sequence on, and
    level after the last."""

    nums: Sequence[int]
    """Sequences in the batch, ascending."""
    tok_s: Sequence[float]
    """Tokens a second of all of them, at each."""
    prefill_tok_s: float = float("inf")

    def step_s(self, num: int, context: float) -> float:
        return num / float(np.interp(num, [0, *self.nums], [0.0, *self.tok_s]))

    def prefill_s(self, tokens: float) -> float:
        return tokens / self.prefill_tok_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A step takes a fixed time, and some for each sequence and each token in the cache."""

    fixed_s: float
    sequence_s: float = 0.0
    context_s: float = 0.0
    prompt_token_s: float = 0.0
    """For each token of a prompt."""

    def step_s(self, num: int, context: float) -> float:
        return self.fixed_s + num * self.sequence_s + context * self.context_s

    def prefill_s(self, tokens: float) -> float:
        return tokens * self.prompt_token_s


class LearnerCost(Protocol):
    """What one step of the learner takes."""

    def step_s(self, tokens: float, squares: float) -> float:
        """Seconds to train samples of ``tokens`` tokens together, the squares of whose lengths add up to
        ``squares``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """Operations over the rate that is reached: forward 2, backward 4 for each active parameter and token, and
    attention: 6 · layers · width · n² / 2 · 2 of a sample of n tokens (Chowdhery et al. 2022, appendix B)."""

    flop_per_token: float
    """6 · active parameters; 4 where their gradients are not needed; 2 more for each pass that only reads log π."""
    flop_per_square: float
    """Of attention."""
    flops: float
    """FLOP/s of the whole learner that are reached."""
    fixed_s: float = 0.0
    """The optimizer, gathering parameters, launching."""

    def step_s(self, tokens: float, squares: float) -> float:
        return (tokens * self.flop_per_token + squares * self.flop_per_square) / self.flops + self.fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRate:
    """So many tokens a second, and a fixed time for each step."""

    tok_s: float
    fixed_s: float = 0.0

    def step_s(self, tokens: float, squares: float) -> float:
        return tokens / self.tok_s + self.fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """From the end of a step to the moment the engines use what it made."""

    snapshot_s: float = 0.0
    """The learner stands still: it copies its weights."""
    travel_s: float = 0.0
    """Hashing, sending, staging: nobody stands still."""
    gap_s: float = 0.0
    """Each engine stands still: it puts the new weights in the place of the old."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What becomes of running sequences."""
    rolling: int | None = None
    """How many engines commit at once; ``None``: one where the interrupt stops generation, all where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """Parts that die. Mean times between failures are of each one by itself, exponentially spread."""

    engine_mtbf_s: float = float("inf")
    engine_restart_s: float = 120.0
    """Until it serves again; its sequences go on elsewhere and are read anew there."""
    learner_mtbf_s: float = float("inf")
    learner_restart_s: float = 600.0
    checkpoint_steps: int = 50
    """Steps that were made since the last checkpoint, half of these on average, are made again."""
