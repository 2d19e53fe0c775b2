"""The checks behind the clauses of :mod:`headrace.testing.engine_contract`. Each function checks one requirement, and
raises ``AssertionError`` or the engine's own error if the engine does not meet it.

``rig`` is the engine under test (``rig.core``) with a learner that publishes weights to it; ``rig.reference_logprobs``
returns the logprobs that transformers computes for an answer under the weights of a version.

Shape legend: T tokens, R tokens whose experts are recorded, L layers with experts, K experts of a token or most likely
vocabulary entries, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.errors import WeightsError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.engine import ForkRequest, ScoreTokens, StaleFork
from headrace.base.types.recorded import Experts
from headrace.base.types.versions import oldest
from headrace.base.types.weights import Interrupt
from headrace.models.routing import RoutingRecorder, find_routing
from headrace.testing.engine_rig import CLOSE, FLUSH, RequestOutput, Rig, assert_close, assert_refused

LONG = 60
"""Number of tokens of an answer, large enough that the answer is still running when the engine is paused."""
LONGER = 240
"""Number of tokens of an answer, large enough that the answer is still running when a server receives a commit."""
_EXACT = frozenset({Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME, Interrupt.ABORT_RETRY, Interrupt.SLEEP})
"""The interrupt modes after which no KV cache of the old weights is used, so that logprobs under the new weights are
exact."""


# -- tokens ---------------------------------------------------------------------------------------------------------


def check_first_weights(rig: Rig) -> None:
    """Check that a request before the first weights is refused; then publish version 0 and check that the engine uses
    it. This must be the first check on a rig."""
    rig.assert_request_refused("before the first", max_new_tokens=4)
    rig.publish(min(rig.capabilities.interrupts & {Interrupt.INFLIGHT, Interrupt.DRAIN}, key=str))
    assert rig.core.stats().version == 0


def check_logprobs(rig: Rig) -> None:
    """Check that each token has the logprob that transformers computes, at two sampling temperatures."""
    for temperature in (1.0, 0.6):
        numbers = [rig.add([3 + at, 4, 5], max_new_tokens=20, temperature=temperature) for at in range(3)]
        for output in rig.finish(*numbers):
            assert len(output.ids) == 20
            assert output.reason is StopReason.LENGTH
            assert set(output.versions) == {rig.version}
            assert_close(output.logprobs, rig.reference_logprobs(rig.version, output, temperature))


def check_truncated_sampling(rig: Rig) -> None:
    """Check for top-k, top-p and min-p that the logprobs of sampled tokens are normalised over the truncated
    distribution, so that they are higher than over the whole vocabulary."""
    for limits in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}):
        (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=16, **limits))
        whole_logprobs = rig.reference_logprobs(rig.version, output)
        assert (np.asarray(output.logprobs) >= whole_logprobs - CLOSE).all(), "less likely than in the whole vocabulary"
        assert np.asarray(output.logprobs).sum() > whole_logprobs.sum() + CLOSE, (
            "nothing was cut off, or not renormalised"
        )


def check_greedy_sampling(rig: Rig) -> None:
    """Check that at temperature 0 each token is the most likely token according to transformers, and has the logprob
    0."""
    (output,) = rig.finish(rig.add([3, 4, 5], temperature=0.0))
    assert output.logprobs == [0.0] * len(output.ids), "what was certain has another logprob than 0"
    rig.model.load_state_dict(rig.weights[rig.version])
    with torch.inference_mode():
        logits_TV = rig.model(input_ids=torch.tensor([output.prompt + output.ids]), use_cache=False).logits[0]
    assert logits_TV[len(output.prompt) - 1 : -1].argmax(-1).tolist() == output.ids


def check_stop_ids(rig: Rig) -> None:
    """Check that an answer ends when one of its stop ids is sampled, and that the stop token is its last token."""
    (free,) = rig.finish(rig.add([3, 4, 5], temperature=0.0))
    last = free.ids[3]
    (output,) = rig.finish(rig.add([3, 4, 5], temperature=0.0, stop_ids=(last,)))
    assert output.reason is StopReason.STOP
    assert output.ids == free.ids[: free.ids.index(last) + 1], "the stop token is the last one, and kept"


def check_streaming(rig: Rig) -> None:
    """Check that an answer is streamed in several chunks, each (except the last) with at least ``flush_tokens``
    tokens."""
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=3 * FLUSH))
    assert len(output.chunks) >= 2, "all came at the end"
    assert all(len(chunk.tokens) >= FLUSH for chunk in output.chunks[:-1])


def check_bad_requests(rig: Rig) -> None:
    """Check that each invalid request is refused with an error that names the problem, and that a running request is
    not affected."""
    running = rig.add([3, 4], max_new_tokens=30)
    rig.assert_request_refused("max_new_tokens=0", max_new_tokens=0)
    rig.assert_request_refused("top_p=0", top_p=0.0)
    rig.assert_request_refused("temperature=-1", temperature=-1.0)
    assert_refused(lambda: rig.core.add(rig.request([])), "empty prompt")
    assert_refused(lambda: rig.core.add(rig.request([3, 10**6])), "1000000")
    assert_refused(lambda: rig.core.add(rig.request([3] * 500, max_new_tokens=100)), "max_context")
    (output,) = rig.finish(running)
    assert len(output.ids) == 30


def check_cancellation(rig: Rig) -> None:
    """Check that a cancelled request ends with the tokens sampled so far, that other requests continue, and that
    unknown request ids are ignored."""
    first, other = rig.add([3, 4], max_new_tokens=200), rig.add([3, 5], max_new_tokens=20)
    rig.run_until(lambda: bool(rig.outputs[first].ids))
    rig.add_chunks(rig.core.abort([first, 10**6]))
    rig.run_until(lambda: rig.outputs[first].ended)
    assert rig.outputs[first].reason is StopReason.ABORTED
    assert 0 < len(rig.outputs[first].ids) < 200
    (output,) = rig.finish(other)
    assert len(output.ids) == 20


def check_deadline(rig: Rig) -> None:
    """Check that a request ends at its deadline with the tokens sampled so far."""
    # no engine samples 400 tokens one after the other in that time
    (output,) = rig.finish(rig.add([3, 4], max_new_tokens=400, deadline_s=0.01))
    assert output.reason is StopReason.DEADLINE
    assert len(output.ids) < 400


def check_continuation(rig: Rig) -> None:
    """Check that a request continues after the answer tokens that it contains. These tokens count towards the length
    limit and are not returned again."""
    (output,) = rig.finish(rig.add([3, 4], max_new_tokens=20, answer_ids_T=np.array([5, 6, 7], np.int32)))
    assert len(output.ids) == 17, "the limit counts what was there, and that does not come again"
    output.prompt += [5, 6, 7]
    assert_close(output.logprobs, rig.reference_logprobs(rig.version, output))


def check_pause(rig: Rig) -> None:
    """Check that a running answer and a request that is added during a pause both get all of their tokens after the
    pause, and that the added request gets none before the engine resumes."""
    number = rig.add([3, 4], max_new_tokens=LONG)
    rig.run_until(lambda: bool(rig.outputs[number].ids))
    rig.core.pause()
    late = rig.add([3, 5])
    assert not rig.outputs[late].ids
    rig.core.resume()
    output, other = rig.finish(number, late)
    assert (len(output.ids), len(other.ids)) == (LONG, 12)


def check_counts(rig: Rig) -> None:
    """Check the engine's counters: an answer increases the generated tokens, the prompt tokens and the busy time, and
    afterwards no request is counted as running or waiting."""
    before = rig.core.stats()
    rig.finish(rig.add([3, 4, 5], max_new_tokens=10))
    after = rig.core.stats()
    assert after.generated_tokens - before.generated_tokens == 10
    assert after.prompt_tokens > before.prompt_tokens
    assert after.busy_s > before.busy_s
    assert (after.running, after.waiting) == (0, 0)


# -- versions -------------------------------------------------------------------------------------------------------


def check_interrupt(rig: Rig, mode: Interrupt) -> None:
    """Check a commit with the interrupt mode ``mode`` while three sequences run: the report counts them, versions never
    decrease within an answer, and every token has the logprob that its version computes."""
    old = rig.version
    rig.stage()
    numbers = [rig.add([3 + at, 4, 5], max_new_tokens=LONGER) for at in range(3)]
    rig.run_until(lambda: all(rig.outputs[number].ids for number in numbers))
    if mode is Interrupt.SLEEP:
        rig.core.pause(release=True)
    rig.core.commit(rig.version, mode)
    report = rig.wait_for_swap()
    assert (report.version, report.mode) == (rig.version, mode)
    num_interrupted = 0 if mode in (Interrupt.DRAIN, Interrupt.BATCH) else len(numbers)
    assert report.carried_over + report.restarted == num_interrupted, "sequences had ended before the commit"
    fresh_request = rig.add([9, 4, 5])
    for output in rig.finish(*numbers):
        assert len(output.ids) == LONGER
        ages = oldest(np.array(output.versions, np.int32)).tolist()  # a mixed version counts as the older one
        assert ages == sorted(ages), "a token of the old weights came after one of the new"
        _check_versions(rig, output, old, mode)
    (output,) = rig.finish(fresh_request)
    assert set(output.versions) == {rig.version}
    assert_close(output.logprobs, rig.reference_logprobs(rig.version, output))


def _check_versions(rig: Rig, output: RequestOutput, old: int, mode: Interrupt) -> None:
    """Check that the tokens of ``output`` have versions that ``mode`` allows, and that their logprobs equal the
    logprobs under the weights of these versions. The answer began under the version ``old``; the newest version is
    ``rig.version``. For modes that keep the KV cache of the old weights, logprobs under the new weights are not
    compared."""
    versions = np.array(output.versions)
    if mode is Interrupt.ABORT_RETRY:
        assert set(output.versions) == {rig.version}
    if mode in (Interrupt.DRAIN, Interrupt.BATCH):
        assert set(output.versions) == {old}
    if mode is not Interrupt.STREAM:
        assert set(output.versions) <= {old, rig.version}
    for version in {old, rig.version} & set(output.versions):
        if version == old or mode in _EXACT:
            of_version = versions == version
            assert_close(np.array(output.logprobs)[of_version], rig.reference_logprobs(version, output)[of_version])


def check_interrupt_is_refused(rig: Rig, mode: Interrupt) -> None:
    """Check that a commit with ``mode``, an interrupt mode that the engine does not support, is refused with an error
    that names the mode, and that the staged version can still be committed with another mode."""
    rig.stage()
    assert_refused(lambda: rig.core.commit(rig.version, mode), mode.value)
    rig.core.commit(rig.version, Interrupt.ABORT_RESUME)
    rig.wait_for_swap()


def check_prefix_cache(rig: Rig) -> None:
    """Check that the prefix cache is not used across versions: a long prompt is computed again after a commit, so that
    logprobs are exact under the new weights."""
    prompt = [3 + at % 17 for at in range(300)]
    rig.finish(rig.add(prompt, max_new_tokens=4))
    rig.publish(Interrupt.DRAIN)
    (output,) = rig.finish(rig.add(prompt, max_new_tokens=4))
    assert_close(output.logprobs, rig.reference_logprobs(rig.version, output))


def check_updates(rig: Rig) -> None:
    """Check that a version that is not newer cannot be staged, that a version that is not staged cannot be committed,
    and that neither attempt changes the weights in use."""
    version = rig.version
    old = rig.publisher.announce(version, version % 2)
    try:
        rig.core.stage(old)
    except WeightsError:
        pass
    else:
        raise AssertionError("a version that is not newer was staged")
    assert_refused(lambda: rig.core.commit(version + 7, Interrupt.DRAIN), f"{version + 7}")
    assert rig.core.stats().version == version
    (output,) = rig.finish(rig.add([3, 4, 5]))
    assert_close(output.logprobs, rig.reference_logprobs(version, output))


# -- optional capabilities ------------------------------------------------------------------------------------------


def check_scores(rig: Rig) -> None:
    """Check that the engine scores given tokens: it returns their logprobs under the weights in use, and the two most
    likely vocabulary entries at each position in descending order."""
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=20))
    ids_T = np.array(output.prompt + output.ids, np.int32)
    top = rig.core.top_scores(ScoreTokens(call=0, ids_T=ids_T, top_k=2))
    assert_close(top.logprobs_T[3:], rig.reference_logprobs(rig.version, output))
    assert (top.logs_TK[3:, 0] >= top.logs_TK[3:, 1]).all()
    assert (top.logs_TK[3:, 0] >= top.logprobs_T[3:] - CLOSE).all()


def check_exact_scores(rig: Rig) -> None:
    """Check that the engine scores given tokens at another temperature than 1."""
    (output,) = rig.finish(rig.add([3, 4, 5]))
    ids_T = np.array(output.prompt + output.ids, np.int32)
    logprobs = rig.core.score(ScoreTokens(call=0, ids_T=ids_T, temperature=2.0))
    assert_close(logprobs[3:], rig.reference_logprobs(rig.version, output, 2.0))


def check_exact_scores_are_refused(rig: Rig) -> None:
    """Check that an engine that scores given tokens at temperature 1 only refuses another temperature, with an error
    that names it."""
    assert_refused(
        lambda: rig.core.score(ScoreTokens(call=0, ids_T=np.array([3, 4], np.int32), temperature=2.0)), "temperature"
    )


def check_forks(rig: Rig) -> None:
    """Check that a request can fork an earlier answer: it continues after the first tokens of that answer, with correct
    logprobs. After a commit, a fork must be refused unless it requests that the prefix is computed again."""
    number = rig.add([3, 4, 5], max_new_tokens=12)
    (parent,) = rig.finish(number)
    child = rig.add([], max_new_tokens=5, fork=ForkRequest(parent=number, at=4))
    rig.outputs[child].prompt = parent.prompt + parent.ids[:4]
    (output,) = rig.finish(child)
    assert_close(output.logprobs, rig.reference_logprobs(rig.version, output))
    rig.publish(Interrupt.DRAIN)
    assert_refused(lambda: rig.add([], fork=ForkRequest(parent=number, at=4)), "version")
    child = rig.add([], max_new_tokens=5, fork=ForkRequest(parent=number, at=4, stale=StaleFork.RECOMPUTE))
    rig.outputs[child].prompt = parent.prompt + parent.ids[:4]
    (output,) = rig.finish(child)
    assert_close(output.logprobs, rig.reference_logprobs(rig.version, output))


def check_stale_cache_is_reused(rig: Rig) -> None:
    """Check that a fork that requests to reuse the KV cache of an earlier answer is accepted."""
    number = rig.add([3, 4, 5])
    rig.finish(number)
    rig.finish(rig.add([], fork=ForkRequest(parent=number, at=4, stale=StaleFork.REUSE)))


def check_stale_cache_is_refused(rig: Rig) -> None:
    """Check that an engine that cannot reuse the KV cache of older weights refuses a fork that requests it."""
    number = rig.add([3, 4, 5])
    rig.finish(number)
    assert_refused(lambda: rig.add([], fork=ForkRequest(parent=number, at=4, stale=StaleFork.REUSE)), "shar")


def check_kept_sets(rig: Rig) -> None:
    """Check that the engine records a kept-set for each token (the vocabulary entries that survived truncated
    sampling), that the kept-set contains the most likely entries, and that the token's logprob is normalised over
    it."""
    for limits in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}):
        (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=20, record_kept=True, **limits))
        spans = [span for chunk in output.chunks if chunk.tokens.kept is not None for span in chunk.tokens.kept.spans()]
        assert len(spans) == len(output.ids), "there are tokens without one"
        logprobs_TV = rig.logits(rig.version, output).log_softmax(-1)
        for at, span in enumerate(spans):
            likeliest = logprobs_TV[at].topk(len(span)).indices.sort().values
            assert span.tolist() == likeliest.tolist(), "other entries are likelier than those that were kept"
            among = logprobs_TV[at, span] - logprobs_TV[at, span].logsumexp(0)
            assert abs(output.logprobs[at] - float(among[span.tolist().index(output.ids[at])])) < CLOSE


def check_entropies(rig: Rig) -> None:
    """Check that the engine records an entropy above 0 for each token: the entropy of the distribution from which the
    token was sampled."""
    (output,) = rig.finish(rig.add([3, 4, 5], record_entropy=True))
    columns = [chunk.tokens.entropies_T for chunk in output.chunks]
    assert all(column is not None and (column > 0).all() for column in columns)


def check_pinning(rig: Rig) -> None:
    """Check that all tokens of a pinned request are sampled by the weights with which it began, although newer weights
    are committed while it runs."""
    old = rig.version
    rig.stage()
    number = rig.add([3, 4], max_new_tokens=LONGER, pinned=True)
    rig.run_until(lambda: bool(rig.outputs[number].ids))
    rig.core.commit(rig.version, Interrupt.INFLIGHT)
    rig.wait_for_swap()
    (output,) = rig.finish(number)
    assert set(output.versions) == {old}


def check_seeds(rig: Rig) -> None:
    """Check that two requests with the same prompt and seed return the same answer."""
    first, second = rig.finish(rig.add([3, 4, 5], seed=7), rig.add([3, 4, 5], seed=7))
    assert first.ids == second.ids


def check_siblings_differ(rig: Rig) -> None:
    """Check that four answers to one prompt, with different seeds, are not all equal."""
    answers = rig.finish(*[rig.add([3, 4, 5], max_new_tokens=20) for _ in range(4)])
    assert len({tuple(output.ids) for output in answers}) > 1, "siblings are all the same"


def check_memory_is_released(rig: Rig) -> None:
    """Check that a running sequence continues with correct logprobs after a pause in which the engine released its
    memory, including the KV cache."""
    number = rig.add([3, 4], max_new_tokens=LONG)
    rig.run_until(lambda: bool(rig.outputs[number].ids))
    rig.core.pause(release=True)
    rig.core.resume()
    (output,) = rig.finish(number)
    assert_close(output.logprobs, rig.reference_logprobs(rig.version, output))


AGENT = "solver"
"""Name of the agent that has an adapter in addition to the policy's."""


def check_adapters(rig: Rig) -> None:
    """Check an engine that receives only adapters (LoRA): commits of several versions while sequences run, and the
    logprobs of sampled and of given tokens. This must be the first check on a rig."""
    check_mixtures(rig)
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=20))
    scored = rig.core.score(ScoreTokens(call=0, ids_T=np.array(output.prompt + output.ids, np.int32)))
    assert_close(scored[3:], rig.reference_logprobs(rig.version, output))


def check_agents(rig: Rig) -> None:
    """Check that a request for an agent is computed with the adapter of that name, in one batch with a request for the
    policy, and that a request for an unknown agent is refused."""
    numbers = {agent: rig.add([3, 4, 5], max_new_tokens=20, agent=agent) for agent in ("", AGENT)}
    for agent, number in numbers.items():
        (output,) = rig.finish(number)
        assert_close(output.logprobs, rig.reference_logprobs(rig.version, output, agent=agent))
        other = rig.reference_logprobs(rig.version, output, agent="" if agent else AGENT)
        assert np.abs(other - output.logprobs).max() > CLOSE, "the adapters say the same"
    assert_refused(lambda: rig.add([3, 4], agent="stranger"), "stranger")


def check_mixtures(rig: Rig) -> None:
    """Check an engine that serves a mixture of experts: commits of several versions while sequences run, with correct
    logprobs. This must be the first check on a rig."""
    check_first_weights(rig)
    for mode in sorted(rig.capabilities.interrupts & {Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME}, key=str):
        check_interrupt(rig, mode)


def check_experts(rig: Rig) -> None:
    """Check that the engine records the experts of each token of prompt and answer, and that transformers chooses the
    same experts. The last token has no experts, because the model does not process it."""
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=20, record_routing=True))
    prompt = output.chunks[0].prompt_routing
    assert prompt is not None
    assert prompt.known_T.all()
    parts = [chunk.tokens.routing for chunk in output.chunks]
    known_T = np.concatenate([part.known_T for part in parts if part is not None])
    assert known_T.tolist() == [True] * 19 + [False]
    recorded = np.concatenate([prompt.experts_RLK, *(part.experts_RLK for part in parts if part is not None)])
    expected = _compute_experts(rig, output)[: len(recorded)]
    assert (np.sort(recorded, -1) == np.sort(expected, -1)).all(), "tokens went to other experts"


def _compute_experts(rig: Rig, output: RequestOutput) -> Experts:
    """Return the indices of the experts, ``[T, L, K]``, that the model in transformers chooses under the newest weights
    for each token of prompt and answer of ``output``."""
    routed = find_routing(rig.model)
    assert routed is not None
    recorder = RoutingRecorder(routed)
    recorder.on = True
    try:
        rig.reference_logprobs(rig.version, output)
        return recorder.take()
    finally:
        recorder.on = False
