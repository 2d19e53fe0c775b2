"""Cost models: pure functions that return the seconds of an engine step, of a training step, and of the weight sync.

In each step, an engine decodes one token for all sequences of its batch. There are three models of its time: the first
is computed from the hardware, the second is a rate from the cluster file, the third is fitted to measurements.

    Roofline   step(B, C) = max[(W + C·kv) / bandwidth, 2·P·B / flops] + t0       C: cached tokens of all sequences
    Constant   step(B)    = B / rate                                              for any batch size
    Linear     step(B, C) = a + b·B + c·C                                         fitted by a calibration
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.base.types.weights import Interrupt


class EngineCost(Protocol):
    """The cost model of one engine, from which a simulated engine computes the duration of its steps and prefills."""

    def step_s(self, num: int, context: float) -> float:
        """Return the seconds of a step that samples one token for each of ``num`` sequences with ``context`` cached
        tokens in total."""
        ...

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds to prefill ``tokens`` prompt tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A cost model from the limits of memory bandwidth and arithmetic (Pope et al. 2022; Williams et al. 2009)."""

    weight_bytes: float
    """Bytes of the weights that every step reads: all weights except those of experts."""
    expert_bytes: float = 0.0
    """Bytes of the weights of all experts; a step reads an expert if at least one of its tokens is routed to it."""
    expert_share: float = 1.0
    """Fraction of the experts that process one token."""
    kv_bytes: float
    """Bytes of one token in the key-value cache."""
    flop_per_token: float
    """Operations per token: 2 · active parameters."""
    bandwidth: float
    """Memory bandwidth that software reaches, in bytes per second."""
    flops: float
    """Rate of arithmetic that software reaches, in operations per second."""
    overhead_s: float = 0.0
    """Fixed time t0 of every step: kernel launches, sampling, scheduling."""

    def step_s(self, num: int, context: float) -> float:
        """Return the seconds of one decoding step of ``num`` sequences with ``context`` cached tokens in total: the
        time to read weights and cache or the time to compute, whichever is longer, plus the overhead."""
        read = self.weight_bytes + context * self.kv_bytes
        if self.expert_bytes:  # an expert is not read if all tokens miss it: (1 - share) to the power of num
            read += self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** num)
        return max(read / self.bandwidth, num * self.flop_per_token / self.flops) + self.overhead_s

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds to prefill ``tokens`` prompt tokens, which only the rate of arithmetic limits."""
        return tokens * self.flop_per_token / self.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantRate:
    """A cost model with a constant number of tokens per second at any batch size; prefill takes no time."""

    tok_s: float
    """Tokens per second of one engine."""

    def step_s(self, num: int, context: float) -> float:
        """Return the seconds of a step of ``num`` sequences: one token for each, at the constant rate; ``context`` has
        no effect."""
        return num / self.tok_s

    def prefill_s(self, tokens: float) -> float:
        """Return 0 for any number of ``tokens``: in this model, prefill takes no time."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A cost model in which a step takes a fixed time, a time per sequence and a time per cached token."""

    fixed_s: float
    """Seconds of a step independent of its batch size."""
    sequence_s: float = 0.0
    """Seconds of a step for each sequence of the batch."""
    context_s: float = 0.0
    """Seconds of a step for each cached token of its sequences."""
    prompt_token_s: float = 0.0
    """Seconds of prefill per prompt token."""

    def step_s(self, num: int, context: float) -> float:
        """Return the seconds of a step of ``num`` sequences with ``context`` cached tokens in total."""
        return self.fixed_s + num * self.sequence_s + context * self.context_s

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds to prefill ``tokens`` prompt tokens."""
        return tokens * self.prompt_token_s


class LearnerCost(Protocol):
    """The cost model of the whole learner, on all its accelerators."""

    def step_s(self, tokens: float, squares: float) -> float:
        """Return the seconds to train samples with ``tokens`` tokens in total; ``squares`` is the sum of the squared
        lengths of the samples."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """A cost model from the number of operations: 2 forward and 4 backward for each active parameter and token, and
    for attention 6 · layers · width · n² / 2 · 2 for a sample of n tokens (Chowdhery et al. 2022, appendix B)."""

    flop_per_token: float
    """Operations per token: 6 · active parameters, or 4 · active parameters if the base weights have no gradients; 2 ·
    active parameters more for recomputed activations and for each pass that only computes log π."""
    flop_per_square: float
    """Operations of attention per squared token of a sample."""
    flops: float
    """Rate of arithmetic that the whole learner reaches, in operations per second."""
    fixed_s: float = 0.0
    """Fixed time of a step: the optimizer, gathering parameters, kernel launches."""

    def step_s(self, tokens: float, squares: float) -> float:
        """Return the seconds to train samples with ``tokens`` tokens in total; ``squares`` is the sum of the squared
        lengths of the samples."""
        return (tokens * self.flop_per_token + squares * self.flop_per_square) / self.flops + self.fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRate:
    """A cost model with a constant number of tokens per second and a fixed time per step."""

    tok_s: float
    """Trained tokens per second of the whole learner."""
    fixed_s: float = 0.0
    """Seconds of a step independent of its batch size."""

    def step_s(self, tokens: float, squares: float) -> float:
        """Return the seconds to train ``tokens`` tokens; ``squares`` is ignored."""
        return tokens / self.tok_s + self.fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """The costs of the weight sync, from the end of a step until the engines use its weights."""

    snapshot_s: float = 0.0
    """Seconds for which the learner stops to copy its weights."""
    travel_s: float = 0.0
    """Seconds of hashing, sending and staging, during which engines and learner continue to work."""
    gap_s: float = 0.0
    """Seconds for which each engine stops to commit the new weights."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What becomes of running sequences at a commit."""
    rolling: int | None = None
    """Number of engines that commit at once; ``None``: one if the interrupt stops generation, otherwise all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """The rates and costs of failures. Times between failures of each part are independent and exponentially
    distributed."""

    engine_mtbf_s: float = float("inf")
    """Mean seconds between two failures of one engine; infinite if none fails."""
    engine_restart_s: float = 120.0
    """Seconds until a failed engine serves again; its sequences continue on other engines, which prefill them again."""
    learner_mtbf_s: float = float("inf")
    """Mean seconds between two failures of the learner; infinite if it never fails."""
    learner_restart_s: float = 600.0
    """Seconds until a failed learner trains again, from its last checkpoint."""
    checkpoint_steps: int = 50
    """Number of steps between two checkpoints; after a failure, half of them are repeated on average."""
