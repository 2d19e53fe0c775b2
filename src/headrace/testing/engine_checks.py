"""The checks behind the clauses of :mod:`headrace.testing.engine_contract`. Each checks one requirement and raises
``AssertionError``, or the engine's own error, if the engine does not meet it.

``rig`` is the engine under test (``rig.core``) with a learner that publishes weights to it; ``rig.reference`` returns
the logprobs that transformers computes for an answer under the weights of a version.

Shape legend: T tokens, R tokens whose experts are recorded, L layers with experts, K experts of a token, or likeliest
entries; V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.errors import WeightsError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, ScoreTokens, StaleFork
from headrace.base.types.recorded import Experts
from headrace.base.types.versions import oldest
from headrace.base.types.weights import Interrupt
from headrace.models.routing import RoutingRecorder, find_routing
from headrace.testing.engine_rig import CLOSE, FLUSH, RequestOutput, Rig, close, refuse

LONG = 60
"""Number of tokens of an answer that is still running when a pause reaches the engine."""
LONGER = 240
"""Number of tokens of an answer that is still running when a commit reaches a server, which samples meanwhile."""
_EXACT = frozenset({Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME, Interrupt.ABORT_RETRY, Interrupt.SLEEP})
"""The interrupt modes after which no cached computation of the old weights is used."""


# -- tokens ---------------------------------------------------------------------------------------------------------


def first_weights(rig: Rig) -> None:
    """Check that a request before the first weights is refused; then publish version 0 and check that it is in use.
    This must be the first check on a rig."""
    rig.refuses("before the first", max_new_tokens=4)
    rig.publish(min(rig.can.interrupts & {Interrupt.INFLIGHT, Interrupt.DRAIN}, key=str))
    assert rig.core.stats().version == 0


def logprobs(rig: Rig) -> None:
    """Check that each token has the logprob that transformers computes, at the temperature of its sampling."""
    for temperature in (1.0, 0.6):
        numbers = [rig.add([3 + at, 4, 5], max_new_tokens=20, temperature=temperature) for at in range(3)]
        for output in rig.finish(*numbers):
            assert len(output.ids) == 20
            assert output.reason is StopReason.LENGTH
            assert set(output.versions) == {rig.version}
            close(output.logprobs, rig.reference(rig.version, output, temperature))


def truncated(rig: Rig) -> None:
    """Check for top-k, top-p and min-p that the logprobs of sampled tokens are renormalised over the tokens that the
    truncation leaves, so that they are higher than in the whole vocabulary."""
    for limits in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}):
        (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=16, **limits))
        whole = rig.reference(rig.version, output)
        assert (np.asarray(output.logprobs) >= whole - CLOSE).all(), "less likely than in the whole vocabulary"
        assert np.asarray(output.logprobs).sum() > whole.sum() + CLOSE, "nothing was cut off, or not renormalised"


def no_truncation(rig: Rig) -> None:
    """Check that an engine without truncated sampling refuses a request with top-k, by name."""
    rig.refuses("top_k", top_k=3)


def greedy(rig: Rig) -> None:
    """Check that at temperature 0 each token is the likeliest one by transformers' logits, and has the logprob 0."""
    (output,) = rig.finish(rig.add([3, 4, 5], temperature=0.0))
    assert output.logprobs == [0.0] * len(output.ids), "what was certain has another logprob than 0"
    rig.model.load_state_dict(rig.weights[rig.version])
    with torch.inference_mode():
        logits_TV = rig.model(input_ids=torch.tensor([output.prompt + output.ids]), use_cache=False).logits[0]
    assert logits_TV[len(output.prompt) - 1 : -1].argmax(-1).tolist() == output.ids


def stops(rig: Rig) -> None:
    """Check that an answer ends when a token among its stop ids is sampled, and that this is its last token."""
    (free,) = rig.finish(rig.add([3, 4, 5], temperature=0.0))
    last = free.ids[3]
    (output,) = rig.finish(rig.add([3, 4, 5], temperature=0.0, stop_ids=(last,)))
    assert output.reason is StopReason.STOP
    assert output.ids == free.ids[: free.ids.index(last) + 1], "the stop token is the last one, and kept"


def streams(rig: Rig) -> None:
    """Check that an answer comes in more than one chunk, each of at least ``flush_tokens`` tokens."""
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=3 * FLUSH))
    assert len(output.chunks) >= 2, "all came at the end"
    assert all(len(chunk.tokens) >= FLUSH for chunk in output.chunks[:-1])


def bad_requests(rig: Rig) -> None:
    """Check that each bad request is refused with an error that names the problem, and that a request which is running
    meanwhile is not affected."""
    running = rig.add([3, 4], max_new_tokens=30)
    rig.refuses("max_new_tokens=0", max_new_tokens=0)
    rig.refuses("top_p=0", top_p=0.0)
    rig.refuses("temperature=-1", temperature=-1.0)
    refuse(lambda: rig.core.add(rig.request([])), "empty prompt")
    refuse(lambda: rig.core.add(rig.request([3, 10**6])), "1000000")
    refuse(lambda: rig.core.add(rig.request([3] * 500, max_new_tokens=100)), "max_context")
    (output,) = rig.finish(running)
    assert len(output.ids) == 30


def cancelled(rig: Rig) -> None:
    """Check that a cancelled request ends with the tokens sampled so far, and that unknown ids are ignored."""
    first, other = rig.add([3, 4], max_new_tokens=200), rig.add([3, 5], max_new_tokens=20)
    rig.until(lambda: bool(rig.outputs[first].ids))
    rig.add_chunks(rig.core.abort([first, 10**6]))
    rig.until(lambda: rig.outputs[first].ended)
    assert rig.outputs[first].reason is StopReason.ABORTED
    assert 0 < len(rig.outputs[first].ids) < 200
    (output,) = rig.finish(other)
    assert len(output.ids) == 20


def deadline(rig: Rig) -> None:
    """Check that a request ends at its deadline with the tokens sampled so far."""
    request = rig.request([3, 4], max_new_tokens=400)
    late = GenerateRequest(
        request_id=request.request_id, prompt_ids_T=request.prompt_ids_T, sampling=request.sampling, deadline_s=0.01
    )  # fmt: skip  # no engine samples 400 tokens one after the other in that time
    rig.core.add(late)
    (output,) = rig.finish(rig.collect(late))
    assert output.reason is StopReason.DEADLINE
    assert len(output.ids) < 400


def continues(rig: Rig) -> None:
    """Check that a request continues after the answer tokens that it contains, which count for the limit and are not
    sent again."""
    request = rig.request([3, 4], max_new_tokens=20)
    begun = GenerateRequest(
        request_id=request.request_id,
        prompt_ids_T=request.prompt_ids_T,
        sampling=request.sampling,
        answer_ids_T=np.array([5, 6, 7], np.int32),
    )
    rig.core.add(begun)
    (output,) = rig.finish(rig.collect(begun))
    assert len(output.ids) == 17, "the limit counts what was there, and that does not come again"
    output.prompt += [5, 6, 7]
    close(output.logprobs, rig.reference(rig.version, output))


def paused(rig: Rig) -> None:
    """Check that after a pause of the engine the answer that was running and a request that came meanwhile both get all
    of their tokens, and that the latter has none before the engine resumes."""
    number = rig.add([3, 4], max_new_tokens=LONG)
    rig.until(lambda: bool(rig.outputs[number].ids))
    rig.core.pause()
    late = rig.add([3, 5])
    assert not rig.outputs[late].ids
    rig.core.resume()
    output, other = rig.finish(number, late)
    assert (len(output.ids), len(other.ids)) == (LONG, 12)


def counts(rig: Rig) -> None:
    """Check the engine's counters: an answer adds its tokens, its prompt tokens and busy time, and after it no request
    is counted as running or waiting."""
    before = rig.core.stats()
    rig.finish(rig.add([3, 4, 5], max_new_tokens=10))
    after = rig.core.stats()
    assert after.generated_tokens - before.generated_tokens == 10
    assert after.prompt_tokens > before.prompt_tokens
    assert after.busy_s > before.busy_s
    assert (after.running, after.waiting) == (0, 0)


# -- versions -------------------------------------------------------------------------------------------------------


def interrupted(rig: Rig, mode: Interrupt) -> None:
    """Check a commit with the interrupt mode ``mode`` while three sequences run: the report counts them, versions never
    fall within an answer, and the logprob of every token is that of the version that it records."""
    old = rig.version
    rig.stage()
    numbers = [rig.add([3 + at, 4, 5], max_new_tokens=LONGER) for at in range(3)]
    rig.until(lambda: all(rig.outputs[number].ids for number in numbers))
    if mode is Interrupt.SLEEP:
        rig.core.pause(release=True)
    rig.core.commit(rig.version, mode)
    report = rig.swapped()
    assert (report.version, report.mode) == (rig.version, mode)
    num_interrupted = 0 if mode in (Interrupt.DRAIN, Interrupt.BATCH) else len(numbers)
    assert report.carried_over + report.restarted == num_interrupted, "sequences had ended before the commit"
    fresh = rig.add([9, 4, 5])
    for output in rig.finish(*numbers):
        assert len(output.ids) == LONGER
        ages = oldest(np.array(output.versions, np.int32)).tolist()  # a mixed version counts as the older one
        assert ages == sorted(ages), "a token of the old weights came after one of the new"
        _check_versions(rig, output, old, mode)
    (output,) = rig.finish(fresh)
    assert set(output.versions) == {rig.version}
    close(output.logprobs, rig.reference(rig.version, output))


def _check_versions(rig: Rig, output: RequestOutput, old: int, mode: Interrupt) -> None:
    """Check the versions that the tokens of ``output`` record, as ``mode`` allows them, and that tokens have the
    logprobs that the weights of their version give. The answer began under the version ``old``; the newest is
    ``rig.version``. Modes that keep an old cache are not compared under the new weights."""
    versions = np.array(output.versions)
    if mode is Interrupt.ABORT_RETRY:
        assert set(output.versions) == {rig.version}
    if mode in (Interrupt.DRAIN, Interrupt.BATCH):
        assert set(output.versions) == {old}
    if mode is not Interrupt.STREAM:
        assert set(output.versions) <= {old, rig.version}
    for version in {old, rig.version} & set(output.versions):
        if version == old or mode in _EXACT:
            at = versions == version
            close(np.array(output.logprobs)[at], rig.reference(version, output)[at])


def refused_interrupt(rig: Rig, mode: Interrupt) -> None:
    """Check that a commit with ``mode``, an interrupt mode that the engine does not support, is refused by name, and
    that the staged version can still be committed with another mode."""
    rig.stage()
    refuse(lambda: rig.core.commit(rig.version, mode), mode.value)
    rig.core.commit(rig.version, Interrupt.ABORT_RESUME)
    rig.swapped()


def prefix_cache(rig: Rig) -> None:
    """Check that a long prompt whose KV cache old weights computed is computed again after a commit, so that logprobs
    are those of the new weights."""
    prompt = [3 + at % 17 for at in range(300)]
    rig.finish(rig.add(prompt, max_new_tokens=4))
    rig.publish(Interrupt.DRAIN)
    (output,) = rig.finish(rig.add(prompt, max_new_tokens=4))
    close(output.logprobs, rig.reference(rig.version, output))


def updates(rig: Rig) -> None:
    """Check that a version which is not newer cannot be staged, that one which is not staged cannot be committed, and
    that the weights in use stay the same."""
    version = rig.version
    old = rig.publisher.announce(version, version % 2)
    try:
        rig.core.stage(old)
    except WeightsError:
        pass
    else:
        raise AssertionError("a version that is not newer was staged")
    refuse(lambda: rig.core.commit(version + 7, Interrupt.DRAIN), f"{version + 7}")
    assert rig.core.stats().version == version
    (output,) = rig.finish(rig.add([3, 4, 5]))
    close(output.logprobs, rig.reference(version, output))


# -- what not every engine has --------------------------------------------------------------------------------------


def scores(rig: Rig) -> None:
    """Check that the engine, given tokens, returns their logprobs under the weights in use, and the two likeliest
    entries at each position in falling order."""
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=20))
    ids_T = np.array(output.prompt + output.ids, np.int32)
    top = rig.core.top_scores(ScoreTokens(call=0, ids_T=ids_T, top_k=2))
    close(top.logprobs_T[3:], rig.reference(rig.version, output))
    assert (top.logs_TK[3:, 0] >= top.logs_TK[3:, 1]).all()
    assert (top.logs_TK[3:, 0] >= top.logprobs_T[3:] - CLOSE).all()


def warm_scores(rig: Rig) -> None:
    """Check that the engine, given tokens, returns their logprobs at another temperature than 1."""
    (output,) = rig.finish(rig.add([3, 4, 5]))
    ids_T = np.array(output.prompt + output.ids, np.int32)
    found = rig.core.score(ScoreTokens(call=0, ids_T=ids_T, temperature=2.0))
    close(found[3:], rig.reference(rig.version, output, 2.0))


def no_warm_scores(rig: Rig) -> None:
    """Check that an engine that computes the logprobs of given tokens at temperature 1 alone refuses another one, by
    name."""
    refuse(
        lambda: rig.core.score(ScoreTokens(call=0, ids_T=np.array([3, 4], np.int32), temperature=2.0)), "temperature"
    )


def forks(rig: Rig) -> None:
    """Check that a request can fork an earlier answer: continue it after its first tokens, with the right logprobs.
    After a commit a fork must be refused, unless it asks for the prefix to be computed again."""
    number = rig.add([3, 4, 5], max_new_tokens=12)
    (parent,) = rig.finish(number)
    child = rig.add([], max_new_tokens=5, fork=ForkRequest(parent=number, at=4))
    rig.outputs[child].prompt = parent.prompt + parent.ids[:4]
    (output,) = rig.finish(child)
    close(output.logprobs, rig.reference(rig.version, output))
    rig.publish(Interrupt.DRAIN)
    refuse(lambda: rig.add([], fork=ForkRequest(parent=number, at=4)), "version")
    child = rig.add([], max_new_tokens=5, fork=ForkRequest(parent=number, at=4, stale=StaleFork.RECOMPUTE))
    rig.outputs[child].prompt = parent.prompt + parent.ids[:4]
    (output,) = rig.finish(child)
    close(output.logprobs, rig.reference(rig.version, output))


def reuse(rig: Rig) -> None:
    """Check that a request can fork an earlier answer and ask to reuse its KV cache, even if older weights computed
    it."""
    number = rig.add([3, 4, 5])
    rig.finish(number)
    rig.finish(rig.add([], fork=ForkRequest(parent=number, at=4, stale=StaleFork.REUSE)))


def no_reuse(rig: Rig) -> None:
    """Check that an engine which cannot reuse the KV cache of older weights refuses a fork that asks for it."""
    number = rig.add([3, 4, 5])
    rig.finish(number)
    refuse(lambda: rig.add([], fork=ForkRequest(parent=number, at=4, stale=StaleFork.REUSE)), "shar")


def kept(rig: Rig) -> None:
    """Check that the engine records a kept-set for each token (the vocabulary entries that truncated sampling left),
    that these are the likeliest entries, and that the token's logprob is normalised over them."""
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


def entropies(rig: Rig) -> None:
    """Check that the engine records for each token the entropy of the distribution that it was drawn from, above 0."""
    (output,) = rig.finish(rig.add([3, 4, 5], record_entropy=True))
    columns = [chunk.tokens.entropies_T for chunk in output.chunks]
    assert all(column is not None and (column > 0).all() for column in columns)


def pinned(rig: Rig) -> None:
    """Check that all tokens of a pinned request come from the weights with which it began, although newer ones are
    committed while it runs."""
    old = rig.version
    rig.stage()
    request = rig.request([3, 4], max_new_tokens=LONGER)
    pinned = GenerateRequest(
        request_id=request.request_id, prompt_ids_T=request.prompt_ids_T, sampling=request.sampling, pinned=True
    )  # fmt: skip
    rig.core.add(pinned)
    number = rig.collect(pinned)
    rig.until(lambda: bool(rig.outputs[number].ids))
    rig.core.commit(rig.version, Interrupt.INFLIGHT)
    rig.swapped()
    (output,) = rig.finish(number)
    assert set(output.versions) == {old}


def no_pins(rig: Rig) -> None:
    """Check that an engine without pinned requests, which keep the weights they began with, refuses one by name."""
    request = rig.request([3, 4])
    refuse(
        lambda: rig.core.add(
            GenerateRequest(
                request_id=request.request_id, prompt_ids_T=request.prompt_ids_T, sampling=request.sampling, pinned=True
            )
        ),
        "pinned",
    )


def seeds(rig: Rig) -> None:
    """Check that two requests with the same prompt and seed get the same answer."""
    first, second = rig.finish(rig.add([3, 4, 5], seed=7), rig.add([3, 4, 5], seed=7))
    assert first.ids == second.ids


def draws_differ(rig: Rig) -> None:
    """Check that four answers to one prompt, with different seeds, are not all the same."""
    answers = rig.finish(*[rig.add([3, 4, 5], max_new_tokens=20) for _ in range(4)])
    assert len({tuple(output.ids) for output in answers}) > 1, "siblings are all the same"


def frees_memory(rig: Rig) -> None:
    """Check that a running sequence continues with the right logprobs after a pause in which the engine freed its
    memory, KV cache included."""
    number = rig.add([3, 4], max_new_tokens=LONG)
    rig.until(lambda: bool(rig.outputs[number].ids))
    rig.core.pause(release=True)
    rig.core.resume()
    (output,) = rig.finish(number)
    close(output.logprobs, rig.reference(rig.version, output))


AGENT = "solver"
"""Name of the agent that has an adapter beside the policy's."""


def adapters(rig: Rig) -> None:
    """Check an engine that gets adapters (LoRA) alone: commits of several versions while sequences run, and the
    logprobs of sampled and of given tokens. This must be the first check on a rig."""
    first_weights(rig)
    for mode in sorted(rig.can.interrupts & {Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME}, key=str):
        interrupted(rig, mode)
    (output,) = rig.finish(rig.add([3, 4, 5], max_new_tokens=20))
    scored = rig.core.score(ScoreTokens(call=0, ids_T=np.array(output.prompt + output.ids, np.int32)))
    close(scored[3:], rig.reference(rig.version, output))


def agents(rig: Rig) -> None:
    """Check that a request for an agent is computed with the adapter of that name, in one batch with a request for the
    policy, and that a request for an unknown agent is refused."""
    numbers = {agent: rig.add([3, 4, 5], max_new_tokens=20, agent=agent) for agent in ("", AGENT)}
    for agent, number in numbers.items():
        (output,) = rig.finish(number)
        close(output.logprobs, rig.reference(rig.version, output, agent=agent))
        other = rig.reference(rig.version, output, agent="" if agent else AGENT)
        assert np.abs(other - output.logprobs).max() > CLOSE, "the adapters say the same"
    refuse(lambda: rig.add([3, 4], agent="stranger"), "stranger")


def mixtures(rig: Rig) -> None:
    """Check an engine that serves a mixture of experts: commits of several versions while sequences run, with the right
    logprobs. This must be the first check on a rig."""
    first_weights(rig)
    for mode in sorted(rig.can.interrupts & {Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME}, key=str):
        interrupted(rig, mode)


def experts(rig: Rig) -> None:
    """Check that the engine records the experts that each token of prompt and answer was routed to, as transformers
    chooses them; not for the last token, which never goes through the model."""
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
    """Return the experts that transformers' own model, under the newest weights, chooses for each token of prompt and
    answer of ``output``: their indices, ``[T, L, K]``."""
    routed = find_routing(rig.model)
    assert routed is not None
    recorder = RoutingRecorder(routed)
    recorder.on = True
    try:
        rig.reference(rig.version, output)
        return recorder.take()
    finally:
        recorder.on = False
