"""Runs on fakes whose engines keep experts in a store: every batch finds its own, whatever is killed and removed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.base import store as store_module
from headrace.base.store import COLUMNS, ColumnStore, StoreReader, read_batch
from headrace.base.types.batch import Batch
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.engine import PLAIN, RequestOptions
from headrace.testing import FakeEngine, FakeLearner, lognormal_lengths
from tests.control.lives import Plan, live


class StoringEngine(FakeEngine):
    """Puts experts and kept-sets that follow from the token ids into a store with small files."""

    def __init__(self, directory: Path) -> None:
        super().__init__(length=lognormal_lengths(20, 1.6, 600))
        self._store = ColumnStore(directory / COLUMNS, "engine", file_bytes=400)

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        async for chunk in super().generate(prompt_ids_T, sampling, options):
            ids_T, count = chunk.tokens.ids_T, len(chunk.tokens)
            tokens = msgspec.structs.replace(
                chunk.tokens,
                routing=Routing(known_T=np.ones(count, bool), experts_RLK=experts(ids_T)),
                kept=KeptSets(ids_E=ids_T, sizes_T=np.ones(count, np.int32)),
            )
            yield self._store.chunk(msgspec.structs.replace(chunk, tokens=tokens))


def experts(ids_T: IntColumn) -> Any:
    return (ids_T[:, None, None] % 251 + np.arange(6).reshape(3, 2)).astype(np.uint8)


class ReadingLearner(FakeLearner):
    """Reads the columns of every batch, and compares them with the tokens."""

    def __init__(self, directory: Path) -> None:
        super().__init__(token_s=0.002)
        self._directory = directory / COLUMNS

    async def train(self, batch: Batch) -> StepReport:
        assert batch.routing is not None
        assert batch.routing.stored
        assert not len(batch.routing.experts_RLK)
        found, lost = read_batch(batch, StoreReader(self._directory))
        assert not lost, lost
        assert found.routing is not None
        assert found.kept is not None
        known_N = found.routing.known_T
        np.testing.assert_array_equal(known_N, batch.versions_N >= 0)
        np.testing.assert_array_equal(found.routing.experts_RLK, experts(batch.ids_N[known_N]))
        np.testing.assert_array_equal(found.kept.ids_E, batch.ids_N[known_N])
        return await super().train(batch)


def plan_of(directory: Path, keep: str) -> Plan:
    return Plan(
        run_dir=directory,
        steps=12,
        flow={"columns": {"keep": keep}, "record_tokens": 16, "max_age": 6},
        run={"checkpoint_every": 1},
        engine=lambda: StoringEngine(directory),
        learner=lambda: ReadingLearner(directory),
    )


def num_files(directory: Path) -> int:
    return len(os.listdir(directory / COLUMNS))


@pytest.mark.parametrize("seed", range(6))
def test_each_batch_finds_its_columns_through_crashes_while_files_are_removed(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "INLINE_BYTES", 0)
    rng, plan, lives = np.random.default_rng(seed), plan_of(tmp_path, "until_trained"), 0
    life = live(plan, crash_at=float(rng.uniform(1, 12)))
    while not life.ended:
        lives += 1
        life = live(plan, crash_at=float(rng.uniform(3, 14)) if lives < 8 else None)
    assert life.summary.ledger.groups.trained == 24
    assert set(life.summary.ledger.tokens.dropped) <= {"discarded", "crash", "restarted"}
    with_ledger = plan.open_ledger()
    assert with_ledger.conservation().holds
    with_ledger.close()
    written = ColumnStore(tmp_path / COLUMNS, "engine")._next
    assert num_files(tmp_path) < written / 2


def test_all_files_stay_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "INLINE_BYTES", 0)
    live(plan_of(tmp_path, "always"))
    assert num_files(tmp_path) == ColumnStore(tmp_path / COLUMNS, "engine")._next > 20


def test_each_snapshot_finds_the_store_safe_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "INLINE_BYTES", 0)
    synced: dict[int, int] = {}
    monkeypatch.setattr(os, "fsync", lambda file: synced.update({os.fstat(file).st_ino: os.fstat(file).st_size}))
    live(plan_of(tmp_path, "always"))
    sizes = [file.stat() for file in sorted((tmp_path / COLUMNS).iterdir())]
    assert len(sizes) > 20
    for size in sizes[:10]:  # those that the first snapshots refer to
        assert synced[size.st_ino] == size.st_size


def test_files_of_dropped_groups_are_removed_at_the_next_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "INLINE_BYTES", 0)
    plan = plan_of(tmp_path, "until_trained")
    plan.flow |= {"policy": {"kind": "unbounded", "stale": "drop_oldest"}, "max_age": 2, "lead": 1}
    life = live(plan)
    assert sum(life.summary.ledger.groups.dropped.values()) > 0
    assert not life.controller.state.flow.columns._unneeded_from
    assert num_files(tmp_path) < ColumnStore(tmp_path / COLUMNS, "engine")._next / 2


class Complaining(FakeLearner):
    """Could not read the columns of two tokens in each step."""

    async def train(self, batch: Batch) -> StepReport:
        report = await super().train(batch)
        dropped = {"columns_lost": 2}
        left = report.trained_tokens - 2
        problem = f"part {batch.step} of the store is gone"
        return msgspec.structs.replace(report, dropped_tokens=dropped, trained_tokens=left, problems=(problem,))


def test_problems_of_steps_are_warnings_and_their_tokens_are_counted(tmp_path: Path) -> None:
    plan = replace(Plan(run_dir=tmp_path, steps=4), learner=lambda: Complaining(token_s=0.002))
    life = live(plan)
    assert life.ended
    assert life.summary.ledger.tokens.dropped == {"columns_lost": 8}
    assert "step 0: part 0 of the store is gone (4 times)" in life.summary.warnings
