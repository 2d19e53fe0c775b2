"""The throughput of the ledger, in transitions and episodes per second, and the time that the ledger adds to the
demo."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, TokenChunk, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.tokens import Tokens
from headrace.flow import FlowConfig
from headrace.flow.ledger import Ledger
from headrace.flow.ledger.base import CommitVersion, EndEpisode, EndStep, Move, Operation, Stream, Submit
from headrace.flow.ledger.opening import LEDGERS, make_ledger
from headrace.flow.ledger.sqlite import IN_MEMORY, SqliteLedger
from headrace.wings.bench.base import Report, Row, at_least, at_most, make_report, measure_s
from headrace.wings.bench.program import train_quietly
from headrace.wings.recipes.demo import build_demo

GROUPS = 2_000
"""The number of groups whose transitions are recorded."""
EPISODES = 4_000
"""The number of episodes that are recorded."""
TOKENS = 2_000
"""The number of sampled tokens per episode."""
TOKEN_BYTES = 12
"""The size of one token in bytes: id, log-probability and version."""
SEQUENCES, PIECE = 64, 256
"""The number of running turns that are recorded in one transaction, and the number of tokens of each."""
PAIRS = 5
DEMO_STEPS = 60
MB = 1e6


def measure(on_progress: Callable[[str], None], quick: bool = False) -> Report:
    """Measure the speed at which ledgers on disk and in memory record operations, one transaction for each; then the
    time of the demo, alternately with its ledger and with a ledger that records nothing. Return a report with rows and
    targets. ``quick`` reduces the work to a tenth, and to one pair of runs. ``on_progress`` is called with lines of
    progress."""
    rows: list[Row] = []
    part = 10 if quick else 1
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        for kind in ("sqlite", "memory"):
            on_progress(f"{kind}: transitions, episodes, running turns")
            directory = Path(scratch) / kind
            directory.mkdir()
            rows.append(_throughput(kind, directory, part))
        on_progress("the demo")
        demo = _demo(Path(scratch), on_progress, 1 if quick else PAIRS)
    disk = rows[0]
    targets = [
        at_least("group transitions", disk["transitions_per_s"], 2_000, "1/s"),
        at_least("episodes", disk["episodes_mb_s"], 50, "MB/s"),
        at_most("demo with its ledger by the demo without", demo["with_by_without"], 1.03, "ratio"),
    ]
    return make_report([*rows, demo], targets)


def _throughput(kind: str, directory: Path, part: int) -> Row:
    """Return a row with the rates per second at which a new ledger of this ``kind`` (``sqlite`` or ``memory``) in
    ``directory`` records transitions of groups, episodes, and parts of running turns. The work is divided by
    ``part``."""
    ledger = make_ledger(FlowConfig(ledger=kind), directory)
    transitions = [operation for number in range(GROUPS // part) for operation in _list_transitions(number)]
    transitions_s = measure_s(partial(_apply, ledger, transitions))
    episodes = [EndEpisode(episode=_episode(index), at_s=0.0) for index in range(EPISODES // part)]
    episodes_s = measure_s(partial(_apply, ledger, episodes))
    parts = [_stream(number) for number in range(200 // part)]
    parts_s = measure_s(partial(_apply, ledger, parts))
    assert ledger.conservation().groups.submitted == GROUPS // part
    ledger.close()
    return {
        "what": kind,
        "transitions_per_s": len(transitions) / transitions_s,
        "episodes_per_s": len(episodes) / episodes_s,
        "episodes_mb_s": len(episodes) * TOKENS * TOKEN_BYTES / MB / episodes_s,
        "running_mb_s": len(parts) * SEQUENCES * PIECE * TOKEN_BYTES / MB / parts_s,
    }


class _NullLedger(SqliteLedger):
    """A ledger that records nothing, with which runs are compared to find the cost of recording."""

    def apply(self, *operations: Operation) -> None:
        """Discard the operations."""
        return


def _null_ledger(config: FlowConfig, run_dir: Path) -> Ledger:
    """Return a ledger that records nothing. The function replaces a function that opens the ledger of a run."""
    return _NullLedger(IN_MEMORY, group_size=config.group_size, groups_per_step=config.groups_per_step)


def _demo(scratch: Path, on_progress: Callable[[str], None], pairs: int) -> Row:
    """Measure the demo's wall time per trained token with its ledger, divided by the same time without a ledger, in
    ``pairs`` pairs of runs. Return a row with the median, the lowest and the highest ratio. Files are written into
    ``scratch``, and ``on_progress`` is called with lines of progress."""
    demo = build_demo(scratch / "demo", seed=0)
    ratios: list[float] = []
    for pair in range(pairs):
        per_token = {}
        for kind in ("memory", "sqlite")[:: 1 if pair % 2 else -1]:
            on_progress(f"demo, pair {pair}, {'with' if kind == 'sqlite' else 'without'} its ledger")
            settings = ("data.eval_path=", f"run.steps={DEMO_STEPS}", f"flow.ledger={kind}")
            with patch.dict(LEDGERS, {"memory": _null_ledger}):
                summary = train_quietly(demo.run_file, scratch / f"run-{pair}-{kind}", *settings)
            per_token[kind] = summary.wall_s / summary.tokens_trained
        ratios.append(per_token["sqlite"] / per_token["memory"])
    return {
        "what": "demo",
        "with_by_without": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def _apply(ledger: Ledger, operations: Iterable[Operation]) -> None:
    """Record ``operations`` in the ledger, each in a transaction of its own."""
    for operation in operations:
        ledger.apply(operation)


def _list_transitions(number: int) -> list[Operation]:
    """Return the eight operations that move group ``number`` from its submission to its release."""
    states = (GroupState.ADMITTED, GroupState.RUNNING, GroupState.SCORED, GroupState.READY, GroupState.TAKEN)
    numbers = (number,)
    return [
        Submit(numbers=numbers, rows=(number,), at_s=0.0),
        *(Move(numbers=numbers, state=state, oldest_version=0, step=number, at_s=0.0) for state in states),
        EndStep(step=number, numbers=numbers, trained_tokens=0, dropped_tokens={}, ages={}, at_s=0.0),
        CommitVersion(version=number + 1, numbers=numbers, checksum="", at_s=0.0),
    ]


def _random_tokens(count: int) -> Tokens:
    """Return ``count`` tokens with random ids and logprobs, sampled by weights of version 3. Every call with the same
    ``count`` returns equal tokens."""
    rng = np.random.default_rng(count)
    return Tokens(
        ids_T=rng.integers(0, 150_000, count).astype(np.int32),
        logprobs_T=-rng.exponential(1.0, count).astype(np.float32),
        versions_T=np.full(count, 3, np.int32),
    )


def _episode(index: int) -> EpisodeGraph:
    """Return the episode number ``index``, with one sampled answer of :data:`TOKENS` tokens; eight successive episodes
    share a group."""
    answer = Turn(author="policy", tokens=_random_tokens(TOKENS), stop_reason=StopReason.STOP)
    return EpisodeGraph(key=EpisodeKey(index // 8, index % 8), turns=[answer], status=EpisodeStatus.SCORED, reward=1.0)


def _stream(number: int) -> Stream:
    """Return the operation that stores :data:`PIECE` tokens of each of :data:`SEQUENCES` running answers. Operations
    with different ``number`` belong to different answers."""
    tokens = _random_tokens(PIECE)
    parts = (
        TokenChunk(key=EpisodeKey(number * 8 + place // 8, place % 8), turn=1, prompt="", tokens=tokens)
        for place in range(SEQUENCES)
    )
    return Stream(parts=tuple(parts), at_s=0.0)
