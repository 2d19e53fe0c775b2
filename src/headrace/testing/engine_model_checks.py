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
"""Name of the agent that has an adapter beside the policy's."""


def adapters(rig: Rig) -> None:
    """Check the tokens of several versions of an adapter, with each interrupt mode that keeps running sequences."""
    first_weights(rig)
    for mode in sorted(rig.can.interrupts & {Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME}, key=str):
        interrupted(rig, mode)
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=20))
    scored = rig.core.score(ScoreTokens(call=0, ids_T=np.array(output.prompt + output.ids, np.int32)))
    close(scored[3:], rig.reference(rig.version, output))


def agents(rig: Rig) -> None:
    """Check that each agent is computed with the adapter of its name, in one batch with the policy, and that an unknown
    agent is refused."""
    numbers = {agent: rig.add([3, 4, 5], max_new_tokens=20, agent=agent) for agent in ("", AGENT)}
    for agent, number in numbers.items():
        (output,) = rig.finish(number)
        close(output.logprobs, rig.reference(rig.version, output, agent=agent))
        other = rig.reference(rig.version, output, agent="" if agent else AGENT)
        assert np.abs(other - output.logprobs).max() > CLOSE, "the adapters say the same"
    refuse(lambda: rig.add([3, 4], agent="stranger"), "stranger")


def mixtures(rig: Rig) -> None:
    """Check the tokens of several versions of a mixture of experts."""
    first_weights(rig)
    for mode in sorted(rig.can.interrupts & {Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME}, key=str):
        interrupted(rig, mode)


def experts(rig: Rig) -> None:
    """Check the recorded experts of every token of prompt and answer except the last, which is not computed."""
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=20, record_routing=True))
    prompt = output.chunks[0].prompt_routing
    assert prompt is not None
    assert prompt.known_T.all()
    parts = [chunk.tokens.routing for chunk in output.chunks]
    known_T = np.concatenate([part.known_T for part in parts if part is not None])
    assert known_T.tolist() == [True] * 19 + [False]
    found = np.concatenate([prompt.experts_RLK, *(part.experts_RLK for part in parts if part is not None)])
    expected = _experts_of(rig, output)[: len(found)]
    assert (np.sort(found, -1) == np.sort(expected, -1)).all(), "tokens went to other experts"


def _experts_of(rig: Rig, output: RequestOutput) -> Experts:
    """Return the experts that transformers itself chooses for each token."""
    routed = find_routing(rig.model)
    assert routed is not None
    recorder = RoutingRecorder(routed)
    recorder.on = True
    try:
        rig.reference(rig.version, output)
        return recorder.take()
    finally:
        recorder.on = False
