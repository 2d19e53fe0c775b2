"""The checks behind the clauses of :mod:`headrace.testing.engine_contract`, each of one promise."""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.errors import WeightsError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, ScoreTokens, StaleFork
from headrace.base.types.versions import oldest
from headrace.base.types.weights import Interrupt
from headrace.testing.engine_rig import CLOSE, FLUSH, RequestOutput, Rig, close, refuse

LONG = 60
LONGER = 240
"""Tokens of a sequence that a commit is to find running: a server samples on while the commit is on its way."""
"""Tokens of an answer that a commit finds running."""
_EXACT = frozenset({Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME, Interrupt.ABORT_RETRY, Interrupt.SLEEP})
"""Ways after which nothing of the old weights is left in what is computed."""


# -- tokens ---------------------------------------------------------------------------------------------------------


def first_weights(rig: Rig) -> None:
    """Nothing is sampled before version 0, which then is in use."""
    rig.refuses("before the first", max_new_tokens=4)
    rig.publish(min(rig.can.interrupts & {Interrupt.INFLIGHT, Interrupt.DRAIN}, key=str))
    assert rig.core.stats().version == 0


def logprobs(rig: Rig) -> None:
    """Each token has the logprob that transformers gives it, at the temperature it was drawn at."""
    for temperature in (1.0, 0.6):
        numbers = [rig.ask([3 + at, 4, 5], max_new_tokens=20, temperature=temperature) for at in range(3)]
        for told in rig.finish(*numbers):
            assert len(told.ids) == 20
            assert told.reason is StopReason.LENGTH
            assert set(told.versions) == {rig.version}
            close(told.logprobs, rig.reference(rig.version, told, temperature))


def truncated(rig: Rig) -> None:
    """What is cut off has no probability: what is left has more."""
    for limits in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}):
        (told,) = rig.finish(rig.ask([3, 4, 5], max_new_tokens=16, **limits))
        whole = rig.reference(rig.version, told)
        assert (np.asarray(told.logprobs) >= whole - CLOSE).all(), "less likely than in the whole vocabulary"
        assert np.asarray(told.logprobs).sum() > whole.sum() + CLOSE, "nothing was cut off, or not told"


def no_truncation(rig: Rig) -> None:
    """It says that it cannot."""
    rig.refuses("top_k", top_k=3)


def greedy(rig: Rig) -> None:
    """The likeliest token, which was certain."""
    (told,) = rig.finish(rig.ask([3, 4, 5], temperature=0.0))
    assert told.logprobs == [0.0] * len(told.ids), "what was certain has another logprob than 0"
    rig.model.load_state_dict(rig.weights[rig.version])
    with torch.inference_mode():
        logits_TV = rig.model(input_ids=torch.tensor([told.prompt + told.ids]), use_cache=False).logits[0]
    assert logits_TV[len(told.prompt) - 1 : -1].argmax(-1).tolist() == told.ids


def stops(rig: Rig) -> None:
    """A stop id ends an answer as its last token."""
    (free,) = rig.finish(rig.ask([3, 4, 5], temperature=0.0))
    last = free.ids[3]
    (told,) = rig.finish(rig.ask([3, 4, 5], temperature=0.0, stop_ids=(last,)))
    assert told.reason is StopReason.STOP
    assert told.ids == free.ids[: free.ids.index(last) + 1], "the stop token is the last one, and kept"


def streams(rig: Rig) -> None:
    """Chunks of at least ``flush_tokens``, and more than one."""
    (told,) = rig.finish(rig.ask([3, 4, 5], max_new_tokens=3 * FLUSH))
    assert len(told.chunks) >= 2, "all came at the end"
    assert all(len(chunk.ids_T) >= FLUSH for chunk in told.chunks[:-1])


def bad_requests(rig: Rig) -> None:
    """Each is refused in words that name it."""
    running = rig.ask([3, 4], max_new_tokens=30)
    rig.refuses("max_new_tokens=0", max_new_tokens=0)
    rig.refuses("top_p=0", top_p=0.0)
    rig.refuses("temperature=-1", temperature=-1.0)
    refuse(lambda: rig.core.add(rig.request([])), "empty prompt")
    refuse(lambda: rig.core.add(rig.request([3, 10**6])), "1000000")
    refuse(lambda: rig.core.add(rig.request([3] * 500, max_new_tokens=100)), "max_context")
    (told,) = rig.finish(running)
    assert len(told.ids) == 30


def withdrawn(rig: Rig) -> None:
    """It ends with what it has; unknown ids are ignored."""
    first, other = rig.ask([3, 4], max_new_tokens=200), rig.ask([3, 5], max_new_tokens=20)
    rig.until(lambda: bool(rig.told[first].ids))
    rig.note(rig.core.abort([first, 10**6]))
    rig.until(lambda: rig.told[first].ended)
    assert rig.told[first].reason is StopReason.ABORTED
    assert 0 < len(rig.told[first].ids) < 200
    (told,) = rig.finish(other)
    assert len(told.ids) == 20


def deadline(rig: Rig) -> None:
    """It ends with what it has."""
    request = rig.request([3, 4], max_new_tokens=400)
    late = GenerateRequest(
        request_id=request.request_id, prompt_ids_T=request.prompt_ids_T, sampling=request.sampling, deadline_s=0.15
    )  # fmt: skip
    rig.core.add(late)
    (told,) = rig.finish(rig.follow(late))
    assert told.reason is StopReason.DEADLINE
    assert len(told.ids) < 400


def continues(rig: Rig) -> None:
    """Behind the tokens that it came with, which count and are not sent again."""
    request = rig.request([3, 4], max_new_tokens=20)
    begun = GenerateRequest(
        request_id=request.request_id,
        prompt_ids_T=request.prompt_ids_T,
        sampling=request.sampling,
        answer_ids_T=np.array([5, 6, 7], np.int32),
    )
    rig.core.add(begun)
    (told,) = rig.finish(rig.follow(begun))
    assert len(told.ids) == 17, "the limit counts what was there, and that does not come again"
    told.prompt += [5, 6, 7]
    close(told.logprobs, rig.reference(rig.version, told))


def paused(rig: Rig) -> None:
    """Nothing comes while it stands still, and all of it afterwards."""
    number = rig.ask([3, 4], max_new_tokens=LONG)
    rig.until(lambda: bool(rig.told[number].ids))
    rig.core.pause()
    late = rig.ask([3, 5])
    assert not rig.told[late].ids
    rig.core.resume()
    told, other = rig.finish(number, late)
    assert (len(told.ids), len(other.ids)) == (LONG, 12)


def counts(rig: Rig) -> None:
    """Tokens, time, and nothing left running."""
    before = rig.core.stats()
    rig.finish(rig.ask([3, 4, 5], max_new_tokens=10))
    after = rig.core.stats()
    assert after.generated_tokens - before.generated_tokens == 10
    assert after.prompt_tokens > before.prompt_tokens
    assert after.busy_s > before.busy_s
    assert (after.running, after.waiting) == (0, 0)


# -- versions -------------------------------------------------------------------------------------------------------


def interrupted(rig: Rig, mode: Interrupt) -> None:
    """A commit that finds sequences running: every token is of the version it says, by its logprob."""
    old = rig.version
    rig.stage()
    numbers = [rig.ask([3 + at, 4, 5], max_new_tokens=LONGER) for at in range(3)]
    rig.until(lambda: all(rig.told[number].ids for number in numbers))
    if mode is Interrupt.SLEEP:
        rig.core.pause(release=True)
    rig.core.commit(rig.version, mode)
    report = rig.swapped()
    assert (report.version, report.mode) == (rig.version, mode)
    met = 0 if mode in (Interrupt.DRAIN, Interrupt.BATCH) else len(numbers)
    assert report.carried_over + report.restarted == met, "sequences had ended before the commit"
    fresh = rig.ask([9, 4, 5])
    for told in rig.finish(*numbers):
        assert len(told.ids) == LONGER
        ages = oldest(np.array(told.versions, np.int32)).tolist()  # a mixed version counts as the older one
        assert ages == sorted(ages), "a token of the old weights came after one of the new"
        _honest(rig, told, old, mode)
    (told,) = rig.finish(fresh)
    assert set(told.versions) == {rig.version}
    close(told.logprobs, rig.reference(rig.version, told))


def _honest(rig: Rig, told: RequestOutput, old: int, mode: Interrupt) -> None:
    """Each token has the logprob that the weights of its version give it."""
    versions = np.array(told.versions)
    if mode is Interrupt.ABORT_RETRY:
        assert set(told.versions) == {rig.version}
    if mode in (Interrupt.DRAIN, Interrupt.BATCH):
        assert set(told.versions) == {old}
    if mode is not Interrupt.STREAM:
        assert set(told.versions) <= {old, rig.version}
    for version in {old, rig.version} & set(told.versions):
        if version == old or mode in _EXACT:
            at = versions == version
            close(np.array(told.logprobs)[at], rig.reference(version, told)[at])


def refused_interrupt(rig: Rig, mode: Interrupt) -> None:
    """The way is refused by name, and the staged version can still be committed another way."""
    rig.stage()
    refuse(lambda: rig.core.commit(rig.version, mode), mode.value)
    rig.core.commit(rig.version, Interrupt.ABORT_RESUME)
    rig.swapped()


def prefix_cache(rig: Rig) -> None:
    """A prompt that old weights have computed is computed again."""
    prompt = [3 + at % 17 for at in range(300)]
    rig.finish(rig.ask(prompt, max_new_tokens=4))
    rig.publish(Interrupt.DRAIN)
    (told,) = rig.finish(rig.ask(prompt, max_new_tokens=4))
    close(told.logprobs, rig.reference(rig.version, told))


def updates(rig: Rig) -> None:
    """What does not fit is refused, and the weights in use stay."""
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
    (told,) = rig.finish(rig.ask([3, 4, 5]))
    close(told.logprobs, rig.reference(version, told))


# -- what not every engine has --------------------------------------------------------------------------------------


def scores(rig: Rig) -> None:
    """Under the weights in use, by one prefill."""
    (told,) = rig.finish(rig.ask([3, 4, 5], max_new_tokens=20))
    ids_T = np.array(told.prompt + told.ids, np.int32)
    top = rig.core.top_scores(ScoreTokens(call=0, ids_T=ids_T, top_k=2))
    close(top.logprobs_T[3:], rig.reference(rig.version, told))
    assert (top.logs_TK[3:, 0] >= top.logs_TK[3:, 1]).all()
    assert (top.logs_TK[3:, 0] >= top.logprobs_T[3:] - CLOSE).all()


def warm_scores(rig: Rig) -> None:
    """At another temperature."""
    (told,) = rig.finish(rig.ask([3, 4, 5]))
    ids_T = np.array(told.prompt + told.ids, np.int32)
    found = rig.core.score(ScoreTokens(call=0, ids_T=ids_T, temperature=2.0))
    close(found[3:], rig.reference(rig.version, told, 2.0))


def no_warm_scores(rig: Rig) -> None:
    """It says that it cannot."""
    refuse(
        lambda: rig.core.score(ScoreTokens(call=0, ids_T=np.array([3, 4], np.int32), temperature=2.0)), "temperature"
    )


def forks(rig: Rig) -> None:
    """Behind a prefix of an earlier answer; after a commit only where that is computed again."""
    number = rig.ask([3, 4, 5], max_new_tokens=12)
    (parent,) = rig.finish(number)
    child = rig.ask([], max_new_tokens=5, fork=ForkRequest(parent=number, at=4))
    rig.told[child].prompt = parent.prompt + parent.ids[:4]
    (told,) = rig.finish(child)
    close(told.logprobs, rig.reference(rig.version, told))
    rig.publish(Interrupt.DRAIN)
    refuse(lambda: rig.ask([], fork=ForkRequest(parent=number, at=4)), "version")
    child = rig.ask([], max_new_tokens=5, fork=ForkRequest(parent=number, at=4, stale=StaleFork.RECOMPUTE))
    rig.told[child].prompt = parent.prompt + parent.ids[:4]
    (told,) = rig.finish(child)
    close(told.logprobs, rig.reference(rig.version, told))


def reuse(rig: Rig) -> None:
    """What older weights have computed may be shared."""
    number = rig.ask([3, 4, 5])
    rig.finish(number)
    rig.finish(rig.ask([], fork=ForkRequest(parent=number, at=4, stale=StaleFork.REUSE)))


def no_reuse(rig: Rig) -> None:
    """It says that it cannot."""
    number = rig.ask([3, 4, 5])
    rig.finish(number)
    refuse(lambda: rig.ask([], fork=ForkRequest(parent=number, at=4, stale=StaleFork.REUSE)), "shar")


def kept(rig: Rig) -> None:
    """Those that could be drawn, and the logprob of a token is that among them."""
    for limits in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}):
        (told,) = rig.finish(rig.ask([3, 4, 5], max_new_tokens=20, record_kept=True, **limits))
        spans = [span for chunk in told.chunks if chunk.kept is not None for span in chunk.kept.spans()]
        assert len(spans) == len(told.ids), "there are tokens without one"
        logprobs_TV = rig.logits(rig.version, told).log_softmax(-1)
        for at, span in enumerate(spans):
            likeliest = logprobs_TV[at].topk(len(span)).indices.sort().values
            assert span.tolist() == likeliest.tolist(), "other entries are likelier than those that were kept"
            among = logprobs_TV[at, span] - logprobs_TV[at, span].logsumexp(0)
            assert abs(told.logprobs[at] - float(among[span.tolist().index(told.ids[at])])) < CLOSE


def entropies(rig: Rig) -> None:
    """One for each token."""
    (told,) = rig.finish(rig.ask([3, 4, 5], record_entropy=True))
    assert all(chunk.entropies_T is not None and (chunk.entropies_T > 0).all() for chunk in told.chunks)


def pinned(rig: Rig) -> None:
    """Its tokens are of the weights that it began with, whatever is committed."""
    old = rig.version
    rig.stage()
    request = rig.request([3, 4], max_new_tokens=LONGER)
    pinned = GenerateRequest(
        request_id=request.request_id, prompt_ids_T=request.prompt_ids_T, sampling=request.sampling, pinned=True
    )  # fmt: skip
    rig.core.add(pinned)
    number = rig.follow(pinned)
    rig.until(lambda: bool(rig.told[number].ids))
    rig.core.commit(rig.version, Interrupt.INFLIGHT)
    rig.swapped()
    (told,) = rig.finish(number)
    assert set(told.versions) == {old}


def no_pins(rig: Rig) -> None:
    """It says that it cannot."""
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
    """Twice the same answer."""
    first, second = rig.finish(rig.ask([3, 4, 5], seed=7), rig.ask([3, 4, 5], seed=7))
    assert first.ids == second.ids


def draws_differ(rig: Rig) -> None:
    """Four answers to one prompt are not all the same."""
    answers = rig.finish(*[rig.ask([3, 4, 5], max_new_tokens=20) for _ in range(4)])
    assert len({tuple(told.ids) for told in answers}) > 1, "siblings are all the same"


def releases(rig: Rig) -> None:
    """Sequences go on from their tokens."""
    number = rig.ask([3, 4], max_new_tokens=LONG)
    rig.until(lambda: bool(rig.told[number].ids))
    rig.core.pause(release=True)
    rig.core.resume()
    (told,) = rig.finish(number)
    close(told.logprobs, rig.reference(rig.version, told))
