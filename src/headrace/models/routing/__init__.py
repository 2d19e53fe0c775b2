"""Routing replay: the learner sends each token to the experts that computed it in the engine.

In a mixture-of-experts model a router scores the experts for every token, and the best few compute it. Numbers that
differ in the last digit, or weights that are a step older, choose other experts, and then the learner's log π belongs
to another computation. So the engine records the chosen experts (:class:`RoutingRecorder`), and the learner replays
them (:class:`RoutingReplay`): the *selection* is the recorded one, the *gate values* come from the current scores of
the selected experts, so that the router keeps its gradient.

    router(hidden) ──▶ logits_NE, gates_NK, experts_NK ──▶ experts compute, weighted by the gates
                            │                    │
       replay: gates of the │ recorded experts ──┘     record: experts_NK, layer by layer

Both are hooks on the router modules of one model, so that the code that computes experts and shared experts is not
changed. To support a family, add its gates to ``formulas.py``.
"""

from headrace.models.routing.base import RoutedModel
from headrace.models.routing.find import find_routing
from headrace.models.routing.replay import NOW, RoutingPass, RoutingRecorder, RoutingReplay

__all__ = ["NOW", "RoutedModel", "RoutingPass", "RoutingRecorder", "RoutingReplay", "find_routing"]
