"""What an engine receives."""

from __future__ import annotations

import msgspec

from headrace.types.sampling import Sampling
from headrace.types.tokens import IntColumn
from headrace.types.weights import WeightUpdate


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to sample."""

    request_id: int
    prompt_ids_T: IntColumn
    sampling: Sampling


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sample these; all of them join the batch in the same step, in this order."""

    requests: tuple[GenerateRequest, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Withdraw these; what was sampled comes back as a last chunk."""

    request_ids: tuple[int, ...]


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring a published version next to the engine and verify it, while decoding goes on."""

    call: int
    update: WeightUpdate


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Use a staged version from the next step on."""

    call: int
    version: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End now."""


Message = Generate | Abort | Stage | Commit | Shutdown
