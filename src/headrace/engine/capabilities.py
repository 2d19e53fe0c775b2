"""What each engine can do, as one record that settings are held against before anything is started or imported.

What an engine lacks is refused by name when a run is loaded: nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.base.types.weights import Interrupt
from headrace.models.devices import CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Of one kind of engine, as this version of Headrace uses it."""

    interrupts: frozenset[Interrupt]
    """The ways in which it commits new weights."""
    truncates: bool
    """Under top-k, top-p or min-p the logprob of a token is that among what could still be drawn."""
    kept_sets: bool
    """Under top-k, top-p or min-p each token comes with what it could have been."""
    routing: bool
    """The tokens of a mixture of experts come with their experts."""
    adapters: bool
    """It takes adapters alone from a learner (LoRA), several where several agents train one."""
    max_rank: int | None
    """Of adapters; ``None``: any."""
    any_adapters: bool
    """Those with norms of their own (DoRA) too, and of experts."""
    entropies: bool
    """Each token comes with the entropy of what it was drawn from."""
    scores: bool
    """It gives the logprobs of tokens that it did not sample, at temperature 1."""
    exact_scores: bool
    """The same at any temperature, and under given kept-sets and experts."""
    forks: bool
    """It continues the beginning of an earlier answer of its own."""
    reuses_stale: bool
    """A fork may share the cache that older weights have computed."""
    pins: bool
    """A sequence may stay under the weights it begins with."""
    seeds: bool
    """A seed fixes the draws of a sequence, whatever else is in the batch."""
    deterministic: bool
    """The same requests give the same bits, whatever the batch."""
    releases: bool
    """It gives the memory of its cache back while it stands still."""
    embedded: bool
    """It can compute in the process that asks: a loop of the user's own, ``headrace serve``."""


_BY_ABORT = frozenset({Interrupt.ABORT_RESUME, Interrupt.ABORT_RETRY, Interrupt.DRAIN, Interrupt.BATCH})
"""Those after which an answer lies under one version, so that nobody has to ask which of its tokens is whose."""
_SERVED = Capabilities(
    interrupts=_BY_ABORT,
    truncates=False,
    kept_sets=False,
    routing=False,
    adapters=False,
    max_rank=None,
    any_adapters=False,
    entropies=False,
    scores=True,
    exact_scores=False,
    forks=True,
    reuses_stale=False,
    pins=False,
    seeds=False,
    deterministic=False,
    releases=False,
    embedded=False,
)
CAPABILITIES: Mapping[str, Capabilities] = {
    "native": Capabilities(
        interrupts=frozenset(Interrupt),
        truncates=True,
        kept_sets=True,
        routing=True,
        adapters=True,
        max_rank=None,
        any_adapters=True,
        entropies=True,
        scores=True,
        exact_scores=True,
        forks=True,
        reuses_stale=True,
        pins=True,
        seeds=True,
        deterministic=True,
        releases=True,
        embedded=True,
    ),
    # its answers end with the spans of their versions, so that they may go on across a commit
    "vllm": replace(
        _SERVED,
        interrupts=_BY_ABORT | {Interrupt.INFLIGHT, Interrupt.INFLIGHT_RECOMPUTE, Interrupt.SLEEP},
        releases=True,
        truncates=True,
        kept_sets=True,
        routing=True,
        adapters=True,
        max_rank=512,
    ),
    "sglang": replace(_SERVED, interrupts=_BY_ABORT | {Interrupt.SLEEP}, routing=True, releases=True),
}
"""By ``engine.kind``."""


def capabilities(kind: str, device: str) -> Capabilities:
    """Of an engine of ``kind`` on ``device``: servers give no memory back on processors."""
    can = CAPABILITIES[kind]
    if not can.embedded and device == CPU:
        return replace(can, releases=False, interrupts=can.interrupts - {Interrupt.SLEEP})
    return can
