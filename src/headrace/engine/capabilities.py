"""The capabilities of an engine, as one record that settings are checked against before anything is started or
imported.

A run file that needs a missing capability is refused with an error that names it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.base.types.weights import Interrupt
from headrace.models.devices import CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of one kind of engine, as this version of Headrace uses it."""

    interrupts: frozenset[Interrupt]
    """The modes in which the engine can commit new weights."""
    truncates: bool
    """Whether the logprob of a token under top-k, top-p or min-p is computed from the truncated and renormalised
    distribution."""
    kept_sets: bool
    """Whether the engine returns the kept-set of each token under top-k, top-p or min-p: the ids of the entries that
    survived the truncation."""
    routing: bool
    """Whether the engine returns the routing of each token of a mixture of experts: the experts chosen in each
    layer."""
    adapters: bool
    """Whether a learner can send LoRA adapters without the base weights, one per agent where several agents are
    trained."""
    max_rank: int | None
    """The highest rank of an adapter; ``None``: unlimited."""
    any_adapters: bool
    """Whether adapters of experts and adapters with norms of their own (DoRA) are supported."""
    entropies: bool
    """Whether the engine returns the entropy of each token's distribution."""
    scores: bool
    """Whether the engine computes the logprobs of given tokens, at temperature 1."""
    exact_scores: bool
    """Whether the engine computes the logprobs of given tokens at any temperature, and under given kept-sets and
    routing."""
    forks: bool
    """Whether a request can fork an earlier one of the same engine: continue it from one of its tokens, with its
    cache."""
    reuses_stale: bool
    """Whether a fork may share cache blocks that older weights computed."""
    pins: bool
    """Whether a sequence can be pinned to the weights that it begins with."""
    seeds: bool
    """Whether a seed determines the draws of a sequence, independent of the other sequences in the batch."""
    deterministic: bool
    """Whether equal requests give equal results bit for bit, independent of the other sequences in the batch."""
    releases: bool
    """Whether the engine can free the memory of its cache while it is paused."""
    embedded: bool
    """Whether the engine can compute in the caller's process, as a training loop of the user's own and ``headrace
    serve`` need."""
    other_models: bool
    """Whether the engine can serve agents and teachers that have weights of their own, beside the policy."""
    structures: bool = False
    """Whether answers can be constrained to a structure, with logprobs and kept-sets of the masked distribution."""

    gangs: bool = False
    """Whether one engine can compute on several devices (``engine.tensor``, ``engine.pipeline``)."""

    def on(self, device: str) -> Capabilities:
        """Return the capabilities on ``device``, such as ``cpu`` or ``cuda:0``. On a processor, engines that are
        servers of their own (not ``embedded``) cannot free their cache, and so cannot commit with
        ``Interrupt.SLEEP``."""
        if not self.embedded and device == CPU:
            return replace(self, releases=False, interrupts=self.interrupts - {Interrupt.SLEEP})
        return self
