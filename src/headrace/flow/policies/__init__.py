"""Staleness policies: they decide when a group may start, which groups form the next batch, and which groups are
dropped because of their age. A new policy is a file in this folder and a member of the union ``AnyPolicy``."""

from __future__ import annotations

from typing import Annotated

from headrace.base.config.kinds import Kinds
from headrace.flow.policies.base import STALE, StalenessPolicy
from headrace.flow.policies.bounded import Bounded
from headrace.flow.policies.lockstep import OneAhead, Synchronous
from headrace.flow.policies.unbounded import Unbounded
from headrace.flow.policies.windowed import Windowed

AnyPolicy = Bounded | Synchronous | OneAhead | Windowed | Unbounded
POLICIES = Kinds(AnyPolicy, group="headrace.policies", setting="flow.policy", contract=StalenessPolicy)
"""The registry of all kinds of policies, including policies of installed packages."""
PolicyConfig = Annotated[AnyPolicy, POLICIES]

__all__ = ["POLICIES", "STALE", "Bounded", "PolicyConfig", "StalenessPolicy"]
