"""Several engines as one fleet: the cost of routing, the effect of a slow engine, and the cost of commits and failures.
A fleet sends each request to one of its engines, and moves the sequences of an engine that fails to other engines.

The time of a routing decision is measured on this machine. All other measurements use engines without a model and the
virtual clock, so that their figures are exact; :mod:`headrace.wings.bench.fleet_kills` kills real engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.base.clock import RealClock, VirtualClock, run_virtual
from headrace.base.heap import gc_frozen
from headrace.base.types.sampling import Sampling
from headrace.base.types.weights import Interrupt
from headrace.engine import Engine, RequestOptions
from headrace.engine.fleet import Fleet
from headrace.wings.bench.base import Report, Row, at_least, at_most, make_report
from headrace.wings.bench.fleet_fakes import TOKEN_S, CountingEngine, commit_weights
from headrace.wings.bench.fleet_kills import measure_kills

ENGINES, SEQUENCES = 50, 5000
"""The numbers of engines and of sequences in the measurement of routing."""
PROMPT_TOKENS, GROUP = 512, 8
"""The number of tokens of a prompt, and the number of sequences with the same prompt."""
FLUSH = 64
"""The number of tokens of a chunk, like ``engine.flush_tokens``."""
ROUNDS = 3
PLACES = 64
"""The largest number of running sequences of an engine in the measurement with a slow engine."""
SLOWNESS = 20
"""The factor by which the slow engine is slower than the others."""
LOADED_S = 120.0
"""The time for which all engines work in the measurement with a slow engine, in virtual seconds."""
COMMITTING = 8
"""The number of engines of the fleet whose commits are measured."""
COMMIT_S = 1.0
"""The time for which a commit stops an engine, in virtual seconds."""
KILLS, KILL_EVERY_S, AWAY_S = 18, 10.0, 5.0
"""The number of kills, the time between two kills, and the time until the killed engine is replaced, in virtual
seconds."""


def measure(on_progress: Callable[[str], None], quick: bool = False) -> Report:
    """Run all measurements and return their report; with ``quick`` the measurements with real engines are left out.
    ``on_progress`` is called with a line of text before each measurement."""
    on_progress(f"routing: {ENGINES} engines, {SEQUENCES} sequences")
    rounds = [_measure_routing() for _ in range(ROUNDS)]
    routed = min(rounds, key=lambda row: float(row["p99_ms"]))
    on_progress("one slow engine")
    slow = _measure_slow_engine()
    on_progress("commits that stop an engine")
    commits = [_measure_commit(rolling) for rolling in (1, 2, 4)]
    on_progress(f"{KILLS} deaths")
    deaths = _measure_failures()
    targets = [
        at_most(f"routing overhead p99, {SEQUENCES} sequences on {ENGINES} engines", routed["p99_ms"], 1.0, "ms"),
        at_least("others' throughput beside one slow engine / without", slow["others_share"], 0.98, "ratio"),
        *(
            at_least(f"throughput in a commit, {k} of {COMMITTING} at once / those that serve", share, 0.95, "ratio")
            for k, share in ((row["k"], row["least_share"] * COMMITTING / (COMMITTING - row["k"])) for row in commits)
        ),
        at_most("sequences lost in deaths", deaths["lost"], 0, "sequences"),
        at_most("tokens made again per death and sequence", deaths["again_per_sequence"], FLUSH, "tokens"),
    ]
    rows = [*rounds, slow, *commits, deaths]
    if not quick:
        row, more = measure_kills(on_progress)
        rows, targets = [*rows, row], [*targets, *more]
    return make_report(rows, targets)


def _measure_routing() -> Row:
    """Measure the time until a request arrives at an engine while all other sequences are in flight. Return a row with
    percentiles of this time in milliseconds, and the time that the fleet adds to a chunk of tokens in microseconds."""
    clock, started_s, latencies_s = RealClock(), dict[int, float](), list[float]()

    def on_request(seed: int) -> None:
        """Store the time until the request with this seed arrived; called by the engine that receives the request."""
        latencies_s.append(clock.now() - started_s[seed])

    async def sample_all(serve: Callable[[int], Engine]) -> float:
        """Sample two answers in each of :data:`SEQUENCES` sessions at once, and return the seconds until the last
        answer has ended. ``serve`` returns the engine, or the fleet, for the session with a given number."""
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, 50_000, (SEQUENCES // GROUP, PROMPT_TOKENS), dtype=np.int32)
        lengths = rng.integers(FLUSH, 8 * FLUSH, (2, SEQUENCES)).tolist()

        async def one(number: int) -> None:
            """Sample both answers of session ``number``, one after the other, and discard their tokens."""
            options = RequestOptions(session=str(number))
            for turn in range(2):  # the second turn starts while all other sequences are in flight
                seed = turn * SEQUENCES + number
                sampling = Sampling(max_new_tokens=lengths[turn][number], seed=seed)
                stream = serve(number).generate(prompts[number // GROUP], sampling, options)
                started_s[seed] = clock.now()
                async for _ in stream:
                    pass

        start_s = clock.now()
        await asyncio.gather(*(one(number) for number in range(SEQUENCES)))
        return clock.now() - start_s

    async def main() -> Row:
        """Return the row of the report, by comparing the fleet with engines that are called directly."""
        engines = [
            CountingEngine(name=f"engine-{index}", flush=FLUSH, on_request=on_request) for index in range(ENGINES)
        ]
        fleet = await _create_fleet(engines)
        alone_s = await sample_all(lambda number: engines[number % ENGINES])
        latencies_s.clear()
        with_fleet_s = await sample_all(lambda _: fleet)
        chunks = sum(engine.num_sampled for engine in engines) / 2 / FLUSH
        latencies_ms = 1e3 * np.array(latencies_s)
        return {
            "what": "routing",
            "p50_ms": float(np.median(latencies_ms)),
            "p99_ms": float(np.percentile(latencies_ms, 99)),
            "max_ms": float(latencies_ms.max()),
            "us_a_chunk": 1e6 * (with_fleet_s - alone_s) / chunks,
        }

    with gc_frozen():
        return run_virtual(main())


def _measure_slow_engine() -> Row:
    """Measure whether one slow engine slows the nine other engines of a fleet. The row contains the number of tokens
    that these sample beside a slow engine, divided by the number beside an engine of the usual speed. All engines have
    more work than they can do."""

    def count_beside(token_s: float) -> int:
        """Return the number of tokens that the other nine engines sample in :data:`LOADED_S` seconds beside an engine
        that needs ``token_s`` seconds for a token."""
        engines = [CountingEngine(name="slow", flush=FLUSH, num_slots=PLACES, token_s=token_s)]
        engines += [CountingEngine(name=f"engine-{index}", flush=FLUSH, num_slots=PLACES) for index in range(9)]
        run_virtual(_run_under_load(engines, 10 * 100, lambda _: asyncio.sleep(LOADED_S)))
        return _count_sampled(engines[1:])

    before, beside = count_beside(TOKEN_S), count_beside(SLOWNESS * TOKEN_S)
    return {"what": f"one of 10 engines {SLOWNESS} times slower", "others_share": beside / before}


def _measure_commit(rolling: int) -> Row:
    """Measure the cost of a commit in a fleet in which at most ``rolling`` engines commit at once while the others
    serve. The row contains the duration of the commit, and the smallest throughput in any fifth of :data:`COMMIT_S`
    during the commit, as a fraction of the throughput before (``least_share``)."""
    engines = [CountingEngine(name=f"engine-{index}", flush=4, commit_s=COMMIT_S) for index in range(COMMITTING)]
    shares, seconds = list[float](), list[float]()

    async def measure_throughput(duration_s: float) -> float:
        """Wait for ``duration_s`` seconds; return how many tokens per second all engines sampled meanwhile."""
        before = _count_sampled(engines)
        await asyncio.sleep(duration_s)
        return (_count_sampled(engines) - before) / duration_s

    async def commit(fleet: Fleet) -> None:
        """Commit version 1 while the fleet serves. Store the duration, and the throughput in each part of this duration
        as a fraction of the throughput before."""
        before, start_s = await measure_throughput(4 * COMMIT_S), VirtualClock().now()
        async with asyncio.TaskGroup() as group:
            committing = group.create_task(commit_weights(fleet, 1, Interrupt.DRAIN))
            while not committing.done():
                shares.append(await measure_throughput(COMMIT_S / 5) / before)
        seconds.append(VirtualClock().now() - start_s)

    run_virtual(_run_under_load(engines, 32 * COMMITTING, commit, rolling=rolling))
    return {
        "what": f"a commit that stops each of {COMMITTING} engines for {COMMIT_S:g} s",
        "k": rolling,
        "seconds": seconds[0],
        "least_share": min(shares),
    }


def _measure_failures() -> Row:
    """Measure the loss when one of three engines fails repeatedly and is replaced. The row contains the number of
    sequences that never ended, and the number of tokens that were sampled again, per sequence that moved to another
    engine."""
    engines = [CountingEngine(name=f"engine-{index}", flush=FLUSH) for index in range(3)]
    all_engines, carried = list(engines), list[int]()

    async def kill(fleet: Fleet) -> None:
        """Kill one engine after the other, and each time let a new engine join the fleet in its place."""
        for number in range(KILLS):
            await asyncio.sleep(KILL_EVERY_S - AWAY_S)
            dying = engines[number % 3]
            dying.dead.set()
            carried.append(fleet.remove(dying.name))
            await asyncio.sleep(AWAY_S)
            engines[number % 3] = CountingEngine(name=dying.name, flush=FLUSH)
            all_engines.append(engines[number % 3])
            fleet.add(dying.name, engines[number % 3])
            await commit_weights(fleet, 0)

    read = run_virtual(_run_under_load(engines, 96, kill))
    again = _count_sampled(all_engines) - read.tokens
    return {
        "what": f"{KILLS} deaths among 3 engines with 96 sequences",
        "sequences": read.started,
        "lost": read.started - read.finished - read.open,
        "carried_over": sum(carried),
        "tokens": read.tokens,
        "tokens_again": again,
        "again_per_sequence": again / sum(carried),
    }


@dataclass(slots=True, kw_only=True)
class _ReaderTotals:
    """The counters of all clients that read from a fleet under constant load."""

    started: int = 0
    """The number of requests."""
    finished: int = 0
    """The number of answers that arrived with all requested tokens."""
    open: int = 0
    """The number of sequences in flight; at the end, the number of sequences that the clients cancelled."""
    tokens: int = 0
    """The number of received tokens."""


async def _run_under_load(
    engines: Sequence[CountingEngine],
    sequences: int,
    body: Callable[[Fleet], Awaitable[None]],
    *,
    rolling: int | None = None,
) -> _ReaderTotals:
    """Create a fleet of ``engines`` and run ``body`` with it, while ``sequences`` clients read one answer after the
    other. Return the counters of the clients. ``rolling`` is the number of engines that may commit at once; ``None``:
    the fleet chooses it."""
    fleet, read, rng = await _create_fleet(engines, rolling=rolling), _ReaderTotals(), np.random.default_rng(0)

    async def reader() -> None:
        """Read one answer after the other until the task is cancelled, and count requests and tokens in ``read``."""
        while True:
            read.started += 1
            read.open += 1
            sampling = Sampling(max_new_tokens=int(rng.integers(FLUSH, 8 * FLUSH)), seed=read.started)
            tokens = 0
            async for chunk in fleet.generate(np.array([read.started], np.int32), sampling):
                read.tokens += len(chunk.tokens)
                tokens += len(chunk.tokens)
            read.open -= 1
            read.finished += tokens == sampling.max_new_tokens

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader()) for _ in range(sequences)]
        await body(fleet)
        for task in tasks:
            task.cancel()
    return read


async def _create_fleet(engines: Sequence[CountingEngine], *, rolling: int | None = None) -> Fleet:
    """Return a fleet of the engines, with version 0 committed on all of them. ``rolling`` is the number of engines that
    may commit at once; ``None``: the fleet chooses it by the mode of a commit."""
    fleet = Fleet(VirtualClock(), size=len(engines), rolling=rolling)
    for engine in engines:
        fleet.add(engine.name, engine)
    await commit_weights(fleet, 0)
    return fleet


def _count_sampled(engines: Iterable[CountingEngine]) -> int:
    """Return the total number of tokens that ``engines`` have sampled so far."""
    return sum(engine.num_sampled for engine in engines)
