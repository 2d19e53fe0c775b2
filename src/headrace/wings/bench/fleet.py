"""Engines as one fleet: what routing costs, whom a slow engine slows, and what commits and deaths cost.

The time of a decision is this machine's. The rest happens among engines that only count, on the virtual clock, so that
its figures are exact; :mod:`headrace.wings.bench.fleet_kills` kills real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.base.clock import RealClock, VirtualClock, run_virtual
from headrace.base.heap import settled_heap
from headrace.base.types.sampling import Sampling
from headrace.base.types.weights import Interrupt
from headrace.engine import Engine, RequestOptions
from headrace.engine.fleet import Fleet
from headrace.wings.bench.base import Report, Row, at_least, at_most, report
from headrace.wings.bench.fleet_fakes import TOKEN_S, Counting, bring
from headrace.wings.bench.fleet_kills import killed

ENGINES, SEQUENCES = 50, 5000
PROMPT_TOKENS, GROUP = 512, 8
FLUSH = 64
"""Tokens of a chunk, as ``engine.flush_tokens``."""
ROUNDS = 3
PLACES = 64
"""Sequences that an engine computes at once, where that matters."""
SLOWNESS = 20
LOADED_S = 120.0
"""How long, of virtual time, everybody works beside a slow engine."""
COMMITTING = 8
"""Engines of the fleet whose commits are looked at."""
COMMIT_S = 1.0
KILLS, KILL_EVERY_S, AWAY_S = 18, 10.0, 5.0


def measure(tell: Callable[[str], None], quick: bool = False) -> Report:
    """All of it; ``quick`` leaves out the real engines."""
    tell(f"routing: {ENGINES} engines, {SEQUENCES} sequences")
    rounds = [_routed() for _ in range(ROUNDS)]
    routed = min(rounds, key=lambda row: float(row["p99_ms"]))
    tell("one slow engine")
    slow = _slowed()
    tell("commits that stop an engine")
    commits = [_rolled(rolling) for rolling in (1, 2, 4)]
    tell(f"{KILLS} deaths")
    deaths = _deaths()
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
        row, more = killed(tell)
        rows, targets = [*rows, row], [*targets, *more]
    return report(rows, targets)


def _routed() -> Row:
    """From the call of a request to the engine that hears it, while all the others are on their way."""
    clock, began, took_s = RealClock(), dict[int, float](), list[float]()

    def heard(seed: int) -> None:
        took_s.append(clock.now() - began[seed])

    async def go(engines: Sequence[Counting], serve: Callable[[int], Engine]) -> float:
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, 50_000, (SEQUENCES // GROUP, PROMPT_TOKENS), dtype=np.int32)
        lengths = rng.integers(FLUSH, 8 * FLUSH, (2, SEQUENCES)).tolist()

        async def one(number: int) -> None:
            options = RequestOptions(session=str(number))
            for turn in range(2):  # the second is asked for while all the others are there
                seed = turn * SEQUENCES + number
                sampling = Sampling(max_new_tokens=lengths[turn][number], seed=seed)
                stream = serve(number).generate(prompts[number // GROUP], sampling, options)
                began[seed] = clock.now()
                async for _ in stream:
                    pass

        start_s = clock.now()
        await asyncio.gather(*(one(number) for number in range(SEQUENCES)))
        return clock.now() - start_s

    async def main() -> Row:
        engines = [Counting(name=f"engine-{place}", flush=FLUSH, asked=heard) for place in range(ENGINES)]
        fleet = await _fleet(engines)
        alone_s = await go(engines, lambda number: engines[number % ENGINES])
        took_s.clear()
        with_fleet_s = await go(engines, lambda _: fleet)
        chunks = sum(engine.made for engine in engines) / 2 / FLUSH
        took_ms = 1e3 * np.array(took_s)
        return {
            "what": "routing",
            "p50_ms": float(np.median(took_ms)),
            "p99_ms": float(np.percentile(took_ms, 99)),
            "max_ms": float(took_ms.max()),
            "us_a_chunk": 1e6 * (with_fleet_s - alone_s) / chunks,
        }

    with settled_heap():
        return run_virtual(main())


def _slowed() -> Row:
    """Tokens of all engines but the first, which is slow or as the others; all have more to do than they can."""

    def made(token_s: float) -> int:
        engines = [Counting(name="slow", flush=FLUSH, places=PLACES, token_s=token_s)]
        engines += [Counting(name=f"engine-{place}", flush=FLUSH, places=PLACES) for place in range(9)]
        run_virtual(_loaded(engines, 10 * 100, lambda _: asyncio.sleep(LOADED_S)))
        return _made(engines[1:])

    usual, beside = made(TOKEN_S), made(SLOWNESS * TOKEN_S)
    return {"what": f"one of 10 engines {SLOWNESS} times slower", "others_share": beside / usual}


def _rolled(rolling: int) -> Row:
    """The least throughput in any fifth of a stop, as a share of the usual."""
    engines = [Counting(name=f"engine-{place}", flush=4, commit_s=COMMIT_S) for place in range(COMMITTING)]
    shares, seconds = list[float](), list[float]()

    async def per_second(for_s: float) -> float:
        before = _made(engines)
        await asyncio.sleep(for_s)
        return (_made(engines) - before) / for_s

    async def commit(fleet: Fleet) -> None:
        usual, start_s = await per_second(4 * COMMIT_S), VirtualClock().now()
        async with asyncio.TaskGroup() as group:
            committing = group.create_task(bring(fleet, 1, Interrupt.DRAIN))
            while not committing.done():
                shares.append(await per_second(COMMIT_S / 5) / usual)
        seconds.append(VirtualClock().now() - start_s)

    run_virtual(_loaded(engines, 32 * COMMITTING, commit, rolling=rolling))
    return {
        "what": f"a commit that stops each of {COMMITTING} engines for {COMMIT_S:g} s",
        "k": rolling,
        "seconds": seconds[0],
        "least_share": min(shares),
    }


def _deaths() -> Row:
    """One of three engines dies, again and again, and comes back."""
    engines = [Counting(name=f"engine-{place}", flush=FLUSH) for place in range(3)]
    ever, carried = list(engines), list[int]()

    async def kill(fleet: Fleet) -> None:
        for number in range(KILLS):
            await asyncio.sleep(KILL_EVERY_S - AWAY_S)
            dying = engines[number % 3]
            dying.dead.set()
            carried.append(fleet.leave(dying.name))
            await asyncio.sleep(AWAY_S)
            engines[number % 3] = Counting(name=dying.name, flush=FLUSH)
            ever.append(engines[number % 3])
            fleet.join(dying.name, engines[number % 3])
            await bring(fleet, 0)

    read = run_virtual(_loaded(engines, 96, kill))
    again = _made(ever) - read.tokens
    return {
        "what": f"{KILLS} deaths among 3 engines with 96 sequences",
        "sequences": read.begun,
        "lost": read.begun - read.ended - read.open,
        "carried_over": sum(carried),
        "tokens": read.tokens,
        "tokens_again": again,
        "again_per_sequence": again / sum(carried),
    }


@dataclass(slots=True, kw_only=True)
class _ReaderTotals:
    """What the readers of a fleet have had."""

    begun: int = 0
    ended: int = 0
    open: int = 0
    """On their way when the readers left."""
    tokens: int = 0


async def _loaded(
    engines: Sequence[Counting], sequences: int, body: Callable[[Fleet], Awaitable[None]], *, rolling: int | None = None
) -> _ReaderTotals:
    """``body`` while so many sequences are always on their way."""
    fleet, read, rng = await _fleet(engines, rolling=rolling), _ReaderTotals(), np.random.default_rng(0)

    async def reader() -> None:
        while True:
            read.begun += 1
            read.open += 1
            sampling = Sampling(max_new_tokens=int(rng.integers(FLUSH, 8 * FLUSH)), seed=read.begun)
            tokens = 0
            async for chunk in fleet.generate(np.array([read.begun], np.int32), sampling):
                read.tokens += len(chunk.tokens)
                tokens += len(chunk.tokens)
            read.open -= 1
            read.ended += tokens == sampling.max_new_tokens

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader()) for _ in range(sequences)]
        await body(fleet)
        for task in tasks:
            task.cancel()
    return read


async def _fleet(engines: Sequence[Counting], *, rolling: int | None = None) -> Fleet:
    """All of them, with weights."""
    fleet = Fleet(VirtualClock(), size=len(engines), rolling=rolling)
    for engine in engines:
        fleet.join(engine.name, engine)
    await bring(fleet, 0)
    return fleet


def _made(engines: Iterable[Counting]) -> int:
    return sum(engine.made for engine in engines)
