"""Detection of the formula by which the routers of a model weight the selected experts, for any family.

    class of the router ──▶ a new instance with random weights ──▶ its outputs for random tokens, in three precisions
    every formula here  ──▶ the same gates for the same experts, bit for bit? ──▶ the first formula for which this holds

A formula is needed because a replay assigns other experts to a token than the router would choose now. Their gates are
computed from the scores of all experts, so that every expert has its current score and its gradient. The precision and
the order of the operations are those of the router, so that the gates of experts that the router selected are
unchanged, bit for bit.

Shape legend: N tokens, H hidden size, E experts, K selected experts.
"""

# gate: getattr - the settings of a foreign router differ from family to family

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.settings import BUILDING

Routed = tuple[Tensor, Tensor, Tensor]
"""The logits ``[N, E]`` of all experts, and the gates and indices ``[N, K]`` of the selected experts."""
_Scores = Callable[[Tensor, Tensor], Tensor]
"""A function ``scores(logits_NE, experts_NK)`` that returns the scores ``[N, K]`` of selected experts."""


def _of_probabilities(given_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Return the scores of the selected experts for a router that returns probabilities instead of logits."""
    return given_NE.gather(1, experts_NK)


_SCORES: tuple[_Scores, ...] = (
    lambda logits_NE, experts_NK: logits_NE.softmax(-1).gather(1, experts_NK),
    lambda logits_NE, experts_NK: logits_NE.sigmoid().gather(1, experts_NK),
    lambda logits_NE, experts_NK: logits_NE.gather(1, experts_NK).softmax(-1),
    _of_probabilities,
)
"""The score functions of routers: softmax over all experts, sigmoid of each logit, softmax over the selected experts,
and probabilities that the router returns instead of logits."""
_EPSILONS: tuple[float | str | None, ...] = ("norm_topk_prob_eps", None, 0.0, 1e-20, 1e-6)
"""The values of :attr:`GateFormula.epsilon`."""
_LEAST = "norm_min"
"""The router's setting for the smallest divisor of the scores."""
_SCALES = (None, "routed_scaling_factor", "route_scale", "router_scaling_factor", "per_expert_scale")
"""The values of :attr:`GateFormula.scale`; the last is a parameter with one number per expert."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""The precisions of the probe. They reveal the operations after which a router rounds."""
_PROBES = 64
"""The number of tokens of the probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFormula:
    """A formula for the gates of selected experts: scores of the experts, which may be divided by their sum and
    multiplied by a scale."""

    scores: _Scores
    """The function that computes the scores of the selected experts from the logits."""
    single: bool
    """Whether scores are computed in float32, whatever the dtype of the logits."""
    epsilon: float | str | None
    """The number that is added to the sum by which the scores of a token are divided, or the name of the router's
    setting that contains it; ``None`` if the scores are not divided."""
    scale: str | None
    """The router's setting or parameter by which the scores are multiplied at the end; ``None`` for none."""

    def __call__(self, router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Return the gates ``[N, K]`` of the experts ``experts_NK``, before they are converted to the router's dtype.
        ``router`` contains the settings that the formula reads."""
        gates_NK = self.scores(logits_NE.float() if self.single else logits_NE, experts_NK)
        if self.epsilon is not None:
            total_N1 = gates_NK.sum(-1, keepdim=True)
            if self.epsilon == _LEAST:
                total_N1 = total_N1.clamp(min=router.norm_min)
            else:
                total_N1 = total_N1 + (getattr(router, self.epsilon) if isinstance(self.epsilon, str) else self.epsilon)
            gates_NK = gates_NK / total_N1
        if self.scale is not None:
            scale = getattr(router, self.scale)
            gates_NK = gates_NK * (scale[experts_NK] if isinstance(scale, Tensor) and scale.ndim else scale)
        return gates_NK


def _read_dense(output: tuple[Tensor, ...], top_k: int) -> Routed:
    """Return the logits and the ``top_k`` largest gates with their experts, for a router that returns the gates of all
    experts and their logits. If the gate of a selected expert is rounded to zero, another expert with the gate zero may
    be returned, which has no effect."""
    weights_NE, logits_NE = output
    gates_NK, experts_NK = weights_NE.topk(top_k, dim=1)
    return logits_NE, gates_NK, experts_NK


def _dense_gates(routed: Routed) -> Tensor:
    """Return the gates of all experts, ``[N, E]``, with zero for experts that were not selected."""
    logits_NE, gates_NK, experts_NK = routed
    return torch.zeros_like(logits_NE).scatter(1, experts_NK, gates_NK.to(logits_NE.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRouter:
    """The properties of a model's routers, which are all of one class: their sizes, and their gate formula."""

    gates: GateFormula
    """The formula for the gates of the selected experts."""
    top_k: int
    """The number of experts per token."""
    num_experts: int
    """The number of experts, without shared experts."""
    gives_logits: bool
    """Whether the router's scores of all experts are logits; otherwise they are probabilities."""
    chooses_by_logits: bool
    """Whether the selected experts are those with the largest logits. Otherwise biases or groups affect the choice."""
    dense: bool = False
    """Whether the routers return the gates ``[N, E]``, zero for experts that are not selected, and then logits (Llama
    4). Otherwise they return logits, gates and indices."""

    def read(self, output: tuple[Tensor, ...]) -> Routed:
        """Return the logits, and the gates and indices of the selected experts, from the output of a router."""
        return _read_dense(output, self.top_k) if self.dense else (output[0], output[1], output[2])

    def make_output(self, routed: Routed) -> tuple[Tensor, ...]:
        """Return the output of a router for the logits, gates and experts in ``routed``. This is the inverse of
        :meth:`read`."""
        if not self.dense:
            return routed
        return _dense_gates(routed), routed[0]


def find_router(router_class: type[nn.Module], config: Any) -> KnownRouter | None:
    """Return the properties of the routers of the class ``router_class`` in a model with the configuration ``config``;
    ``None`` if none of the formulas here is that of the routers."""
    found = [_Probe.run(router_class, config, dtype) for dtype in _DTYPES]
    probes = [probe for probe in found if probe is not None]
    if len(probes) < len(found):
        return None
    for formula in _formulas(probes[0].router):
        if all(probe.computed_by(formula) for probe in probes):
            return KnownRouter(
                gates=formula,
                top_k=probes[0].experts_NK.shape[1],
                num_experts=probes[0].logits_NE.shape[1],
                gives_logits=formula.scores is not _of_probabilities,
                chooses_by_logits=probes[-1].chooses_by_logits(formula),
                dense=probes[0].dense,
            )
    return None


def _formulas(router: nn.Module) -> Iterator[GateFormula]:
    """Yield all formulas for which ``router`` has the settings, in the order in which they are tried."""
    epsilons = [each for each in (_LEAST, *_EPSILONS) if not isinstance(each, str) or hasattr(router, each)]
    scales = [each for each in _SCALES if each is None or hasattr(router, each)]
    for scores, single, epsilon, scale in itertools.product(_SCORES, (True, False), epsilons, scales):
        yield GateFormula(scores=scores, single=single, epsilon=epsilon, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """The outputs of a router with random weights for N random tokens. A formula is right if it computes the same gates
    from the same logits and experts."""

    router: nn.Module
    """The router with random weights."""
    logits_NE: Tensor
    """What the router returns for all E experts: logits, or probabilities for some routers."""
    gates_NK: Tensor
    """The gates (the weights in the output) of the K experts that the router selected for each token."""
    experts_NK: Tensor
    """The indices of the selected experts."""
    dense: bool
    """Whether the router returns gates of all experts, as in :attr:`KnownRouter.dense`."""

    @staticmethod
    @torch.inference_mode()
    def run(router_class: type[nn.Module], config: Any, dtype: torch.dtype) -> _Probe | None:
        """Build a router of the class ``router_class`` from the model's configuration ``config``, with random weights
        of the type ``dtype``, and call it. Return ``None`` if it cannot be built or called in the usual way, or does
        not return logits, gates and experts."""
        generator = torch.Generator().manual_seed(0)
        with BUILDING, torch.random.fork_rng(devices=[]), torch.device("cpu"):
            try:
                router: Any = router_class(config).to(dtype).eval()
            except (TypeError, AttributeError):
                return None
        for each in itertools.chain(router.parameters(), router.buffers()):
            # all of one sign, so that the logits of a token are all large or all small
            values = torch.randn(each.shape, generator=generator).abs()
            each.copy_(-values / math.sqrt(each.shape[-1] if each.ndim else 1))
        matrix = next((each for each in router.parameters() if each.ndim == 2), None)
        if matrix is None:
            return None
        num_experts, size = matrix.shape
        scale_N1 = torch.logspace(-2, 1, _PROBES)[:, None]
        scale_N1[::2] *= -1
        hidden_NH = (torch.randn(_PROBES, size, generator=generator).abs() * scale_N1).to(dtype)
        biases = [torch.randn(num_experts, generator=generator) for _ in range(_num_biases(router_class))]
        for given in (hidden_NH, hidden_NH[None]):
            try:
                output = router(given, *biases)
                dense = len(output) == 2
                routed = logits_NE, gates_NK, experts_NK = _read_dense(output, router.top_k) if dense else output
                if dense and not torch.equal(_dense_gates(routed), output[0]):
                    return None  # experts that are not selected have gates, too
            except (TypeError, ValueError, IndexError, RuntimeError, AttributeError):
                continue
            found = _Probe(router=router, logits_NE=logits_NE, gates_NK=gates_NK, experts_NK=experts_NK, dense=dense)
            return found if found.fits(num_experts) else None
        return None

    def fits(self, num_experts: int) -> bool:
        """Return whether the outputs have the form of a router's outputs: logits of each of the ``num_experts``
        experts, and gates of some."""
        tensors = [self.logits_NE, self.gates_NK, self.experts_NK]
        return (
            all(isinstance(each, Tensor) and each.ndim == 2 and len(each) == _PROBES for each in tensors)
            and self.logits_NE.shape[1] == num_experts
            and self.gates_NK.shape == self.experts_NK.shape
            and not self.experts_NK.is_floating_point()
        )

    def computed_by(self, formula: GateFormula) -> bool:
        """Return whether ``formula`` computes the router's gates for the experts that it selected, bit for bit."""
        found_NK = formula(self.router, self.logits_NE, self.experts_NK).to(self.gates_NK.dtype)
        return torch.equal(found_NK.nan_to_num(-1.0), self.gates_NK.nan_to_num(-1.0))

    def chooses_by_logits(self, formula: GateFormula) -> bool:
        """Return whether the router has selected the experts with the largest logits, for all tokens whose scores under
        ``formula`` are all different."""
        scores_NE = formula.scores(
            self.logits_NE.float(), torch.arange(self.logits_NE.shape[1]).expand_as(self.logits_NE)
        )
        differ_N = (scores_NE.sort(-1).values.diff(dim=-1) > 0).all(-1)
        best_NK = self.logits_NE.topk(self.experts_NK.shape[1]).indices
        same_N = (best_NK.sort(-1).values == self.experts_NK.sort(-1).values).all(-1)
        return bool(differ_N.any() and same_N[differ_N].all())


def _num_biases(router_class: type[nn.Module]) -> int:
    """Return the number of arguments of the router after the tokens, which are biases of experts."""
    given = list(inspect.signature(router_class.forward).parameters.values())[2:]
    return sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in given)
