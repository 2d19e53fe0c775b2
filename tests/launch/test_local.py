"""An engine in a thread, over a core whose every token is known beforehand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
import pytest

from headrace.base.clock import RealClock
from headrace.base.errors import ComponentDied, DeadlineError, EngineFull, RequestError, SequenceFailed, WeightsError
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import GenerateRequest, ScoreTokens
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import FloatColumn, Tokens
from headrace.base.types.weights import Interrupt, Manifest, SwapReport, WeightUpdate
from headrace.engine import RequestOptions
from headrace.launch.inprocess import LocalEngine, LocalEngineConfig

DEADLINE_S = 20.0
ENDLESS = 10_000
UPDATE = WeightUpdate(version=1, slot=0, path="", manifest=Manifest(entries=(), total_bytes=0), checksums=())


class CountingCore:
    """An engine core that counts: after a prompt that ends in k come k + 1, k + 2, ...; one token each step."""

    def __init__(self) -> None:
        self.joined: list[list[int]] = []
        """Last prompt tokens of what joined together."""
        self.aborted: list[int] = []
        self.version = 0
        self.staging, self.go_on_staging = threading.Event(), threading.Event()
        self.break_at = -1
        """A token whose sequence breaks."""
        self.die_at = -1
        """A token that kills the core."""
        self._new: list[GenerateRequest] = []
        self._running: dict[int, tuple[GenerateRequest, int]] = {}
        self._swaps: list[SwapReport] = []
        self._draining: int | None = None
        self._paused = False
        self._steps = 0

    def add(self, request: GenerateRequest) -> None:
        if request.prompt_ids_T[-1] < 0:
            raise RequestError("the prompt is negative", remedy="give a positive one")
        self._new.append(request)

    def abort(self, request_ids: Sequence[int]) -> list[TokenChunk]:
        chunks = []
        for request_id in request_ids:
            self._new = [request for request in self._new if request.request_id != request_id]
            if self._running.pop(request_id, None):
                self.aborted.append(request_id)
                chunks.append(_chunk(request_id, [], stop_reason=StopReason.ABORTED))
        return chunks

    def has_work(self) -> bool:
        return bool(self._new or self._running) and not self._paused

    def step(self) -> list[TokenChunk]:
        self._steps += 1
        if self._new and self._draining is None:
            self.joined.append([int(request.prompt_ids_T[-1]) for request in self._new])
            self._running |= {request.request_id: (request, 0) for request in self._new}
            self._new = []
        chunks = [self._grow(request_id) for request_id in list(self._running)]
        if self._draining is not None and not self._running:
            self._swap(self._draining, Interrupt.DRAIN)
            self._draining = None
        return chunks

    def _grow(self, request_id: int) -> TokenChunk:
        request, count = self._running[request_id]
        token = int(request.prompt_ids_T[-1]) + count + 1
        if token == self.die_at:
            raise ZeroDivisionError("token of doom")
        if token == self.break_at:
            del self._running[request_id]
            return _chunk(request_id, [], error="the logits hold NaN; look at the weights")
        self._running[request_id] = (request, count + 1)
        if count + 1 < request.sampling.max_new_tokens:
            return _chunk(request_id, [token], self.version)
        del self._running[request_id]
        return _chunk(request_id, [token], self.version, stop_reason=StopReason.LENGTH)

    def score(self, request: ScoreTokens) -> FloatColumn:
        if len(request.ids_T) < 2:
            raise RequestError("nothing to score", remedy="give two tokens")
        return request.ids_T.astype(np.float32) * request.temperature

    def stage(self, update: WeightUpdate) -> None:
        self.staging.set()
        assert self.go_on_staging.wait(DEADLINE_S)
        if update.version <= self.version:
            raise WeightsError("old", remedy="send a newer one")

    def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
        if mode is Interrupt.DRAIN and self._running:
            self._draining = version
        else:
            self._swap(version, mode)

    def _swap(self, version: int, mode: Interrupt) -> None:
        self.version = version
        carried = len(self._running)
        self._swaps.append(SwapReport(version=version, gap_s=0.0, carried_over=carried, restarted=0, mode=mode))

    def take_swaps(self) -> list[SwapReport]:
        swaps, self._swaps = self._swaps, []
        return swaps

    def pause(self, *, release: bool = False) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stats(self) -> EngineStats:
        return EngineStats(version=self.version, steps=self._steps, running=len(self._running))


def _chunk(
    request_id: int, ids: list[int], version: int = 0, stop_reason: StopReason | None = None, error: str = ""
) -> TokenChunk:  # fmt: skip
    return TokenChunk(
        request_id=request_id,
        tokens=Tokens(
            ids_T=np.array(ids, np.int32),
            logprobs_T=np.zeros(len(ids), np.float32),
            versions_T=np.full(len(ids), version, np.int32),
        ),
        stop_reason=stop_reason,
        error=error,
    )


def within(
    test: Callable[[LocalEngine, CountingCore], Awaitable[None]], terms: LocalEngineConfig | None = None
) -> CountingCore:  # fmt: skip
    """Run ``test`` with an open engine, and in time; the core, for questions afterwards."""
    core, before = CountingCore(), set(threading.enumerate())  # a server of other tests may have an engine

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), LocalEngine(core, clock=RealClock(), config=terms) as engine:
            await test(engine, core)

    asyncio.run(run())
    assert not [each for each in threading.enumerate() if each not in before and each.name.startswith("engine")]
    return core


async def sample(engine: LocalEngine, last: int, count: int) -> list[TokenChunk]:
    prompt = np.array([last], np.int32)
    return [chunk async for chunk in engine.generate(prompt, Sampling(max_new_tokens=count))]


def ids(chunks: list[TokenChunk]) -> list[int]:
    return Tokens.concat([chunk.tokens for chunk in chunks]).ids_T.tolist()


def test_tokens_arrive_in_order_and_the_last_chunk_says_why_it_is_the_last() -> None:
    async def test(engine: LocalEngine, _: CountingCore) -> None:
        chunks = await sample(engine, 10, 5)
        assert ids(chunks) == [11, 12, 13, 14, 15]
        assert [chunk.stop_reason for chunk in chunks] == [None] * 4 + [StopReason.LENGTH]

    within(test)


def test_requests_of_one_turn_join_together_in_their_order() -> None:
    async def test(engine: LocalEngine, core: CountingCore) -> None:
        answers = await asyncio.gather(*(sample(engine, last, 3) for last in (30, 10, 20)))
        assert [ids(chunks)[0] for chunks in answers] == [31, 11, 21]
        assert core.joined == [[30, 10, 20]]

    within(test)


def test_leaving_early_withdraws_the_request_and_no_other() -> None:
    async def test(engine: LocalEngine, core: CountingCore) -> None:
        other = asyncio.ensure_future(sample(engine, 50, 200))
        stream = engine.generate(np.array([1], np.int32), Sampling(max_new_tokens=ENDLESS))
        assert (await anext(stream)).tokens.ids_T.tolist() == [2]
        await stream.aclose()
        assert len(ids(await other)) == 200
        await engine.score(Tokens.observed([1, 2]))  # behind the withdrawal
        assert len(core.aborted) == 1

    within(test)


def test_a_request_left_in_the_turn_it_was_made_never_runs_on() -> None:
    async def test(engine: LocalEngine, _: CountingCore) -> None:
        task = asyncio.ensure_future(sample(engine, 1, ENDLESS))
        await asyncio.sleep(0)
        task.cancel()
        assert ids(await sample(engine, 7, 2)) == [8, 9]
        assert engine.stats().running == 0

    within(test)


def test_a_refused_request_fails_alone() -> None:
    async def test(engine: LocalEngine, _: CountingCore) -> None:
        good, bad = await asyncio.gather(sample(engine, 1, 2), sample(engine, -5, 2), return_exceptions=True)
        assert isinstance(good, list)
        assert ids(good) == [2, 3]
        assert isinstance(bad, RequestError)
        assert bad.problem == "the prompt is negative"

    within(test)


def test_a_sequence_that_breaks_fails_alone_and_says_why() -> None:
    async def test(engine: LocalEngine, core: CountingCore) -> None:
        core.break_at = 103
        good, bad = await asyncio.gather(sample(engine, 1, 9), sample(engine, 100, 9), return_exceptions=True)
        assert isinstance(good, list)
        assert isinstance(bad, SequenceFailed)
        assert (bad.problem, bad.remedy) == ("the logits hold NaN", "look at the weights")

    within(test)


def test_one_request_too_many_is_refused_until_another_has_ended() -> None:
    async def test(engine: LocalEngine, _: CountingCore) -> None:
        stream = engine.generate(np.array([1], np.int32), Sampling(max_new_tokens=ENDLESS))
        await anext(stream)
        with pytest.raises(EngineFull, match="1 requests"):
            await sample(engine, 5, 1)
        engine.withdraw_all()
        *_, last = [chunk async for chunk in stream]
        assert last.stop_reason is StopReason.ABORTED
        assert ids(await sample(engine, 5, 1)) == [6]

    within(test, LocalEngineConfig(max_requests=1))


def test_the_death_of_the_thread_reaches_every_waiter_in_words() -> None:
    async def test(engine: LocalEngine, core: CountingCore) -> None:
        core.die_at = 1000
        drained = asyncio.ensure_future(_drain_later(engine))
        ends = await asyncio.gather(
            sample(engine, 1, ENDLESS), sample(engine, 990, ENDLESS), drained, return_exceptions=True
        )
        for end in ends:
            assert isinstance(end, ComponentDied)
            assert "ZeroDivisionError: token of doom" in end.problem
        assert await engine.wait_for_death() is engine.death
        for late in (sample(engine, 1, 1), engine.score(Tokens.observed([1, 2])), engine.stage(UPDATE)):
            with pytest.raises(ComponentDied, match="token of doom"):
                await late

    within(test)


async def _drain_later(engine: LocalEngine) -> SwapReport:
    await sample(engine, 5, 1)
    return await engine.commit(1, Interrupt.DRAIN)


def test_closing_ends_what_is_open() -> None:
    async def run() -> None:
        engine = LocalEngine(CountingCore(), clock=RealClock())
        async with asyncio.timeout(DEADLINE_S), engine:
            reading = asyncio.ensure_future(sample(engine, 1, ENDLESS))
            await sample(engine, 1, 1)
        with pytest.raises(ComponentDied, match="was closed"):
            await reading
        with pytest.raises(ComponentDied, match="was closed"):
            await sample(engine, 1, 1)

    asyncio.run(run())


def test_decoding_goes_on_while_an_update_is_staged() -> None:
    async def test(engine: LocalEngine, core: CountingCore) -> None:
        staged = asyncio.ensure_future(engine.stage(UPDATE))
        await asyncio.to_thread(core.staging.wait, DEADLINE_S)
        assert ids(await sample(engine, 1, 3)) == [2, 3, 4]
        assert not staged.done()
        core.go_on_staging.set()
        assert await staged > 0
        with pytest.raises(WeightsError, match="old"):
            await engine.stage(msgspec.structs.replace(UPDATE, version=0))

    within(test)


def test_a_commit_that_waits_for_sequences_reports_when_it_is_done() -> None:
    async def test(engine: LocalEngine, core: CountingCore) -> None:
        stream = engine.generate(np.array([1], np.int32), Sampling(max_new_tokens=300))
        await anext(stream)
        report, rest = await asyncio.gather(engine.commit(1, Interrupt.DRAIN), _rest(stream))
        assert report.version == 1
        assert set(Tokens.concat([chunk.tokens for chunk in rest]).versions_T.tolist()) == {0}
        assert (await sample(engine, 1, 1))[0].tokens.versions_T.tolist() == [1]
        assert (await engine.commit(2)).mode is Interrupt.INFLIGHT
        assert engine.stats().version == 2

    within(test)


def test_a_commit_is_asked_for_once_at_a_time_and_the_first_is_answered() -> None:
    async def test(engine: LocalEngine, _: CountingCore) -> None:
        stream = engine.generate(np.array([1], np.int32), Sampling(max_new_tokens=300))
        await anext(stream)
        first = asyncio.ensure_future(engine.commit(1, Interrupt.DRAIN))
        await asyncio.sleep(0)
        with pytest.raises(WeightsError, match="commit of version 1, which has been asked for already"):
            await engine.commit(1)
        await _rest(stream)
        assert (await first).version == 1

    within(test)


@pytest.mark.parametrize("closing", [True, False])
def test_who_waits_for_a_stage_hears_of_the_engines_end_and_of_the_deadline(closing: bool) -> None:
    async def run() -> None:
        core = CountingCore()
        terms = LocalEngineConfig(deadline_s=DEADLINE_S if closing else 0.05)
        async with asyncio.timeout(DEADLINE_S / 2):
            engine = await LocalEngine(core, clock=RealClock(), config=terms).__aenter__()
            staged = asyncio.ensure_future(engine.stage(UPDATE))
            await asyncio.to_thread(core.staging.wait, DEADLINE_S)
            closed = asyncio.ensure_future(engine.__aexit__()) if closing else None
            kind, words = (ComponentDied, "was closed") if closing else (DeadlineError, "stage version 1")
            with pytest.raises(kind, match=words) as raised:
                await staged
            assert "the learner" not in str(raised.value), "it has none"
            core.go_on_staging.set()
            await (closed or engine.__aexit__())

    asyncio.run(run())


async def _rest(stream) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


def test_a_paused_engine_samples_nothing_until_it_is_resumed() -> None:
    async def test(engine: LocalEngine, core: CountingCore) -> None:
        await engine.pause()
        asked = asyncio.ensure_future(sample(engine, 1, 2))
        await engine.score(Tokens.observed([1, 2]))  # behind the request
        assert engine.stats().steps == 0
        await engine.resume()
        assert ids(await asked) == [2, 3]

    within(test)


def test_a_score_is_computed_between_two_steps_and_may_be_refused() -> None:
    async def test(engine: LocalEngine, _: CountingCore) -> None:
        logprobs = await engine.score(Tokens.observed([3, 4]), temperature=2.0)
        assert logprobs.tolist() == [6.0, 8.0]
        with pytest.raises(RequestError, match="nothing to score"):
            await engine.score(Tokens.observed([3]))

    within(test)


def test_a_commit_that_takes_too_long_says_so() -> None:
    async def test(engine: LocalEngine, _: CountingCore) -> None:
        stream = engine.generate(np.array([1], np.int32), Sampling(max_new_tokens=10**9))
        await anext(stream)
        with pytest.raises(DeadlineError, match=r"0\.05 s: commit version 1") as late:
            await engine.commit(1, Interrupt.DRAIN)
        assert late.value.remedy == "if the machine is only slow, raise LocalEngineConfig.deadline_s"
        await stream.aclose()

    within(test, LocalEngineConfig(deadline_s=0.05))


def test_a_restart_throws_away_what_was_not_read() -> None:
    class Restarting(CountingCore):
        ended = threading.Event()

        def step(self) -> list[TokenChunk]:
            (chunk,) = super().step()
            if self._steps < 3:
                return [chunk]
            if self._steps == 4:
                self.ended.set()
            return [msgspec.structs.replace(chunk, lost="restarted" if self._steps == 3 else "")]

    async def run() -> list[TokenChunk]:
        async with asyncio.timeout(DEADLINE_S), LocalEngine(Restarting(), clock=RealClock()) as engine:
            stream = engine.generate(np.array([0], np.int32), Sampling(max_new_tokens=4), RequestOptions())
            first = await anext(stream)
            await asyncio.to_thread(Restarting.ended.wait, DEADLINE_S)  # the reader does not read
            return [first, *await _rest(stream)]

    chunks = asyncio.run(run())
    seen = [(chunk.tokens.ids_T.tolist(), bool(chunk.lost)) for chunk in chunks]
    assert seen[-2:] == [([3], True), ([4], False)]
    assert seen[:-2] in ([], [([1], False)])  # the first may be read in time
