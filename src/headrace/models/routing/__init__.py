"""Routing replay: the learner computes each token with the experts that computed it in the engine.

In a mixture-of-experts model, a router scores the experts for every token, and the best few compute it. Slightly
different numbers, or weights that are one step older, lead to other experts, so that the learner's log π would belong
to another computation. Therefore the engine records the selected experts (:class:`RoutingRecorder`), and the learner
replays them (:class:`RoutingReplay`): the *selection* is the recorded one, and the *gate values* are computed from the
current scores of the selected experts, so that the router still has a gradient.

    router(hidden) ──▶ logits_NE, gates_NK, experts_NK ──▶ experts compute, weighted by the gates
                            │                    │
       replay: gates of the │ recorded experts ──┘     record: experts_NK, layer by layer

Both are hooks on the router modules of one model, so that the code of experts and shared experts is not changed. To
support a family, add its gate formula to ``formulas.py``.
"""

from headrace.models.routing.base import RoutedModel
from headrace.models.routing.find import find_routing
from headrace.models.routing.replay import NOW, RoutingPass, RoutingRecorder, RoutingReplay

__all__ = ["NOW", "RoutedModel", "RoutingPass", "RoutingRecorder", "RoutingReplay", "find_routing"]
