"""Recording of the experts that compute each token, and replay of recorded experts.

    with replay(routing) ──▶ a context variable contains the routing ──▶ the router's output is changed

A layer whose activations are computed again in the backward pass must use the same routing as in the forward pass, even
if another replay, or none, is active by then. For this, its checkpoint stores :data:`NOW`
(:mod:`headrace.models.recompute`).

Shape legend: N tokens of a pass, L mixture-of-experts layers, K experts per token and layer, R tokens whose routing is
known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError
from headrace.base.types.recorded import Experts, Routing
from headrace.models.recompute import ContextValues
from headrace.models.routing.base import RoutedModel


class RoutingPass:
    """The routing of one forward pass, and its difference from the routers' own choice. A :class:`RoutingReplay`
    creates it and yields it to the caller."""

    def __init__(self, routing: Routing, routed: RoutedModel, *, forced: bool, device: torch.device) -> None:
        """Prepare the replay of ``routing``, the recorded experts of each token, in the layers that ``routed``
        describes, with tensors on ``device``. If ``forced`` is false, the routers select on their own, and only the
        differences are counted."""
        self.routed = routed
        """The model of the replay to which the pass belongs."""
        small = np.uint8 if routing.experts_RLK.dtype == np.uint8 else np.int32
        experts_NLK = np.zeros((len(routing), routed.num_layers, routed.top_k), small)
        experts_NLK[routing.known_T] = routing.experts_RLK
        self.num_known = int(routing.known_T.sum())
        """The number of tokens whose routing is known."""
        self.total = self.num_known * routed.num_layers
        """The number of pairs of a token with known routing and a layer, of which :attr:`differing` is a part."""
        self._forced = forced
        self._known_N = torch.tensor(routing.known_T, device=device)
        """Whether the experts of each token are known."""
        self._experts_NLK = torch.from_numpy(experts_NLK).to(device)
        """The recorded experts of each token; arbitrary where they are not known."""
        self._differing: dict[int, Tensor] = {}
        """The number of tokens with known routing for which the router of each layer would select other experts, on the
        device."""

    @property
    def differing(self) -> int:
        """Return the number of pairs of a token with known routing and a layer for which the router would choose
        another set of experts. Waits for the device."""
        return int(torch.stack(list(self._differing.values())).sum()) if self._differing else 0

    @property
    def num_layers(self) -> int:
        """Return the number of layers whose routers have been called in this pass."""
        return len(self._differing)

    def route(self, index: int, router: nn.Module, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the output of the router of layer ``index`` with the recorded experts for tokens with known routing,
        if the pass is ``forced``; otherwise unchanged. In both cases, count the tokens for which the router would
        choose other experts."""
        known = self.routed.known
        logits_NE, gates_NK, live_NK = known.read(output)
        if len(live_NK) != len(self._known_N):
            raise ModelError(
                f"a forward pass of {len(live_NK)} tokens under the routing of {len(self._known_N)} tokens",
                remedy="give the routing of exactly the tokens of the pass, in their order",
            )
        known_N1 = self._known_N[:, None]
        experts_NK = torch.where(known_N1, self._experts_NLK[:, index].long(), live_NK)
        self._differing[index] = (experts_NK.sort(-1).values != live_NK.sort(-1).values).any(-1).sum()
        if not self._forced:
            return output
        gates_NK = known.gates(router, logits_NE, experts_NK).to(gates_NK.dtype)
        return known.make_output((logits_NE, gates_NK, experts_NK))


NOW: ContextVar[RoutingPass | None] = ContextVar("routing", default=None)
"""The routing of the pass that is being computed; ``None`` outside a replay."""


class RoutingReplay:
    """The replay of recorded experts in forward passes of one model. It is not thread-safe. A model may have several
    replays (a learner has one for each of its adapters); each of them changes only its own passes.

    Tokens with known routing are computed by the recorded experts, with the gates that the current router assigns to
    them. Other tokens are routed as usual. If the recorded experts are those that the routers would choose, in the same
    order, nothing changes, bit for bit.
    """

    def __init__(self, routed: RoutedModel) -> None:
        """Register a hook on every router of the model that ``routed`` describes. Outside a replay the hooks change
        nothing."""
        self._routed = routed
        for index, layer in enumerate(routed.layers):
            layer.router.register_forward_hook(partial(self._route, index), prepend=True)

    @contextmanager
    def __call__(self, routing: Routing, *, forced: bool = True) -> Iterator[RoutingPass]:
        """Replay ``routing`` in the forward pass inside the ``with`` block; its backward pass may be computed later.
        ``routing`` must contain exactly the tokens of the pass.

        With ``forced=False``, the routers choose on their own, and only the differences are counted.

        Raises :class:`~headrace.base.errors.ModelError` for a routing that this model cannot have chosen (see
        :meth:`RoutedModel.problem`), for a pass with other tokens, and if no pass was computed or some routers were not
        called.
        """
        problem = routing.problem(len(routing)) or self._routed.problem(routing.experts_RLK)
        if problem:
            raise ModelError(
                f"the routing cannot be replayed: {problem}",
                remedy="replay what an engine with the same model and configuration recorded",
            )
        device = next(self._routed.layers[0].router.parameters()).device
        current = RoutingPass(routing, self._routed, forced=forced, device=device)
        with ContextValues({NOW: current}):
            yield current
        if current.num_layers != self._routed.num_layers:
            raise ModelError(
                f"the replay reached {current.num_layers} of {self._routed.num_layers} routers",
                remedy="run the forward pass inside the with block; "
                "if that is so, a fused kernel bypasses the router: load the model without it",
            )

    def _route(self, index: int, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the output of a router with the recorded experts, in a pass of this replay; unchanged in any other
        pass. A forward hook of the router."""
        current = NOW.get()
        return output if current is None or current.routed is not self._routed else current.route(index, router, output)


class RoutingRecorder:
    """A recorder of the experts of the latest forward pass, while :attr:`on` is true. Create one recorder per model. An
    engine uses it to send the experts of each token together with the token.

    During a replay, the replayed experts are recorded, since they compute the tokens. It is not thread-safe.
    """

    def __init__(self, routed: RoutedModel) -> None:
        """Register a hook on every router of the model that ``routed`` describes; recording is off at first."""
        self._known, self.on = routed.known, False
        """Whether passes are recorded. If not, the recorder costs one Python call per layer."""
        self._dtype = torch.uint8 if routed.dtype.itemsize == 1 else torch.uint16
        """The dtype in which experts are recorded."""
        self._experts: list[Tensor | None] = [None] * routed.num_layers
        """The experts of the latest pass for each layer; ``None`` for a layer that has not been computed."""
        for index, layer in enumerate(routed.layers):
            layer.router.register_forward_hook(partial(self._record, index))

    def stacked(self) -> Tensor:
        """Return the experts ``[N, L, K]`` of the pass since the last call, in the order of their rank, on the model's
        device, as uint8 or uint16. No transfer is started, so that the call may be part of a captured graph.

        Raises :class:`~headrace.base.errors.ModelError` unless every router was called while the recorder was on.
        """
        recorded = [experts_NK for experts_NK in self._experts if experts_NK is not None]
        missing = [index for index, experts_NK in enumerate(self._experts) if experts_NK is None]
        if missing:
            raise ModelError(
                f"no routing was recorded in {len(missing)} of {len(self._experts)} layers (the first: {missing[0]})",
                remedy="set recorder.on before the forward pass and take once after it; "
                "if that is so, a fused kernel bypasses the router: load the model without it",
            )
        self._experts = [None] * len(self._experts)
        return torch.stack(recorded, dim=1).to(self._dtype)

    def take(self) -> Experts:
        """Return the experts ``[N, L, K]`` of the pass since the last call in host memory. Errors are those of
        :meth:`stacked`."""
        experts_NLK: Experts = self.stacked().cpu().numpy()
        return experts_NLK

    def _record(self, index: int, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        """Store the experts that the router of layer ``index`` selected, while recording is on. A forward hook of the
        router."""
        if self.on:
            self._experts[index] = self._known.read(output)[2]
