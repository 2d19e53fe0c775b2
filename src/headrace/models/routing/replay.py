"""Record which experts compute each token, and send tokens to recorded experts.

    with replay(routing) ──▶ a context variable holds it ──▶ router's output changes

A layer whose activations are computed again in the backward pass must route as it did, even if another pass, or none,
is being replayed by then: its checkpoint carries :data:`NOW` (:mod:`headrace.models.recompute`).

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
    """The routing of one forward pass, and its difference from what the routers would choose. A :class:`RoutingReplay`
    makes it and yields it to the caller."""

    def __init__(self, routing: Routing, routed: RoutedModel, *, forced: bool, device: torch.device) -> None:
        """Prepare to give ``routing``, the recorded experts of each token, to the routers; with ``forced`` false, only
        to count where they would choose others."""
        self.routed = routed
        """The model of the replay that the pass belongs to."""
        small = np.uint8 if routing.experts_RLK.dtype == np.uint8 else np.int32
        experts_NLK = np.zeros((len(routing), routed.num_layers, routed.top_k), small)
        experts_NLK[routing.known_T] = routing.experts_RLK
        self.num_known = int(routing.known_T.sum())
        """The number of tokens whose routing is known."""
        self.total = self.num_known * routed.num_layers
        """The number of pairs of a known token and a layer, of which :attr:`differing` counts some."""
        self._forced = forced
        self._known_N = torch.tensor(routing.known_T, device=device)
        self._experts_NLK = torch.from_numpy(experts_NLK).to(device)
        self._differing: dict[int, Tensor] = {}

    @property
    def differing(self) -> int:
        """Return the number of pairs of a known token and a layer for which the router would choose another set of
        experts. Waits for the device."""
        return int(torch.stack(list(self._differing.values())).sum()) if self._differing else 0

    @property
    def num_layers(self) -> int:
        """Return the number of layers whose routers have run in this pass so far."""
        return len(self._differing)

    def route(self, index: int, router: nn.Module, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Replace the output of the router of layer ``index`` by one that sends each token with known routing to its
        recorded experts, if the pass is ``forced``; in any case, count the tokens for which the router would choose
        others."""
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
        return known.output_of((logits_NE, gates_NK, experts_NK))


NOW: ContextVar[RoutingPass | None] = ContextVar("routing", default=None)
"""The routing of the pass that is being computed."""


class RoutingReplay:
    """A replay: it makes forward passes of one model use recorded experts. It is not thread-safe. A model may have
    several (a learner has one for each of its adapters); each handles its own passes.

    Known tokens go to the recorded experts, with the gates that the current router gives to those; unknown tokens
    are routed live. If the recorded experts are those that the routers would choose, in their order, nothing
    changes, bit for bit.
    """

    def __init__(self, routed: RoutedModel) -> None:
        """Add a hook to every router of the model; outside a replay the hooks change nothing."""
        self._routed = routed
        for index, layer in enumerate(routed.layers):
            layer.router.register_forward_hook(partial(self._route, index), prepend=True)

    @contextmanager
    def __call__(self, routing: Routing, *, forced: bool = True) -> Iterator[RoutingPass]:
        """Replay ``routing``, of exactly the tokens of the pass, in the forward pass of the ``with`` block; its
        backward pass may come later.

        With ``forced=False`` the routers choose live, and only the difference of their choice is counted.

        Raises :class:`~headrace.base.errors.ModelError` for routing that this model cannot have chosen (see
        :meth:`RoutedModel.problem`), for a pass of other tokens, and if there was no pass or it did not reach every
        router.
        """
        problem = routing.problem(len(routing)) or self._routed.problem(routing.experts_RLK)
        if problem:
            raise ModelError(
                f"the routing cannot be replayed: {problem}",
                remedy="replay what an engine with the same model and configuration recorded",
            )
        device = next(self._routed.layers[0].router.parameters()).device
        seen = RoutingPass(routing, self._routed, forced=forced, device=device)
        with ContextValues({NOW: seen}):
            yield seen
        if seen.num_layers != self._routed.num_layers:
            raise ModelError(
                f"the replay reached {seen.num_layers} of {self._routed.num_layers} routers",
                remedy="run the forward pass inside the with block; "
                "if that is so, a fused kernel bypasses the router: load the model without it",
            )

    def _route(self, index: int, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the output of a router in the pass that is being replayed, changed to the recorded experts; unchanged
        in any other pass. A forward hook of the router."""
        seen = NOW.get()
        return output if seen is None or seen.routed is not self._routed else seen.route(index, router, output)


class RoutingRecorder:
    """A recorder of the experts of the last forward pass, while :attr:`on`. Install it once per model; an engine does
    so to send the experts of each token with the token.

    During a replay it records the replayed experts, which compute the tokens. It is not thread-safe.
    """

    def __init__(self, routed: RoutedModel) -> None:
        """Add a hook to every router of the model; recording is off at first."""
        self._known, self.on = routed.known, False
        """Whether passes are recorded. When off, it costs one Python call per layer."""
        self._dtype = torch.uint8 if routed.dtype.itemsize == 1 else torch.uint16
        self._chosen: list[Tensor | None] = [None] * routed.num_layers
        for index, layer in enumerate(routed.layers):
            layer.router.register_forward_hook(partial(self._note, index))

    def stacked(self) -> Tensor:
        """Return the experts ``[N, L, K]`` of the pass since the last call, in the order of their rank, on the model's
        device, as uint8 or uint16. No transfer is started, so the call may be part of a captured graph.

        Raises :class:`~headrace.base.errors.ModelError` unless every router ran while the recorder was on.
        """
        chosen = [experts_NK for experts_NK in self._chosen if experts_NK is not None]
        missing = [index for index, experts_NK in enumerate(self._chosen) if experts_NK is None]
        if missing:
            raise ModelError(
                f"no routing was recorded in {len(missing)} of {len(self._chosen)} layers (the first: {missing[0]})",
                remedy="set recorder.on before the forward pass and take once after it; "
                "if that is so, a fused kernel bypasses the router: load the model without it",
            )
        self._chosen = [None] * len(self._chosen)
        return torch.stack(chosen, dim=1).to(self._dtype)

    def take(self) -> Experts:
        """Return the experts ``[N, L, K]`` of the pass since the last call in host memory; see :meth:`stacked`."""
        experts_NLK: Experts = self.stacked().cpu().numpy()
        return experts_NLK

    def _note(self, index: int, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        """Keep the experts that the router of layer ``index`` chose, while recording is on. A forward hook of the
        router."""
        if self.on:
            self._chosen[index] = self._known.read(output)[2]
