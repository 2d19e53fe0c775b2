"""The checks behind the clauses about adapters and mixtures of experts."""

from __future__ import annotations

import numpy as np

from headrace.base.types.messages.engine import ScoreTokens
from headrace.base.types.recorded import Experts
from headrace.base.types.weights import Interrupt
from headrace.models.routing import RoutingRecorder, find_routing
from headrace.testing.engine_checks import first_weights, interrupted
from headrace.testing.engine_rig import CLOSE, RequestOutput, Rig, close, refuse

AGENT = "solver"
"""Who has an adapter beside the policy's."""


def adapters(rig: Rig) -> None:
    """Of several versions, under each way of committing that keeps what runs; the base alone says something else."""
    first_weights(rig)
    for mode in sorted(rig.can.interrupts & {Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME}, key=str):
        interrupted(rig, mode)
    (told,) = rig.finish(rig.ask([3, 4, 5], max_new_tokens=20))
    scored = rig.core.score(ScoreTokens(call=0, ids_T=np.array(told.prompt + told.ids, np.int32)))
    close(scored[3:], rig.reference(rig.version, told))


def agents(rig: Rig) -> None:
    """Each has the adapter of its name, beside the policy's in one batch; nobody else is known."""
    numbers = {agent: rig.ask([3, 4, 5], max_new_tokens=20, agent=agent) for agent in ("", AGENT)}
    for agent, number in numbers.items():
        (told,) = rig.finish(number)
        close(told.logprobs, rig.reference(rig.version, told, agent=agent))
        other = rig.reference(rig.version, told, agent="" if agent else AGENT)
        assert np.abs(other - told.logprobs).max() > CLOSE, "the adapters say the same"
    refuse(lambda: rig.ask([3, 4], agent="stranger"), "stranger")


def mixtures(rig: Rig) -> None:
    """Of several versions, each expert's."""
    first_weights(rig)
    for mode in sorted(rig.can.interrupts & {Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME}, key=str):
        interrupted(rig, mode)


def experts(rig: Rig) -> None:
    """Of every token of prompt and answer but the last, which nothing has been computed from."""
    (told,) = rig.finish(rig.ask([3, 4, 5], max_new_tokens=20, record_routing=True))
    prompt = told.chunks[0].prompt_routing
    assert prompt is not None
    assert prompt.known_T.all()
    parts = [chunk.routing for chunk in told.chunks]
    known_T = np.concatenate([part.known_T for part in parts if part is not None])
    assert known_T.tolist() == [True] * 19 + [False]
    found = np.concatenate([prompt.experts_RLK, *(part.experts_RLK for part in parts if part is not None)])
    expected = _experts_of(rig, told)[: len(found)]
    assert (np.sort(found, -1) == np.sort(expected, -1)).all(), "tokens went to other experts"


def _experts_of(rig: Rig, told: RequestOutput) -> Experts:
    """Where transformers itself sends each token."""
    routed = find_routing(rig.model)
    assert routed is not None
    recorder = RoutingRecorder(routed)
    recorder.on = True
    try:
        rig.reference(rig.version, told)
        return recorder.take()
    finally:
        recorder.on = False
