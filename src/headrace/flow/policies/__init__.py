"""Staleness policies: when a group may start, which groups make the next batch, and which leave untrained. A new one is
a file here and a row of ``AnyPolicy``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.flow.policies.base import DISPLACED, STALE, Selection, StalenessPolicy
from headrace.flow.policies.bounded import Bounded
from headrace.flow.policies.one_ahead import OneAhead
from headrace.flow.policies.synchronous import Synchronous
from headrace.flow.policies.unbounded import Unbounded
from headrace.flow.policies.windowed import Windowed

AnyPolicy = Bounded | Synchronous | OneAhead | Windowed | Unbounded
PolicyConfig = Annotated[AnyPolicy, Field(discriminator="kind")]

__all__ = [
    "DISPLACED",
    "STALE",
    "AnyPolicy",
    "Bounded",
    "OneAhead",
    "PolicyConfig",
    "Selection",
    "StalenessPolicy",
    "Synchronous",
    "Unbounded",
    "Windowed",
]
