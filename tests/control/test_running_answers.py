"""Answers that were being sampled when everything died continue from what was recorded of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.engine import PLAIN, RequestOptions
from headrace.testing import FakeEngine, lognormal_lengths
from tests.control.lives import Plan, SiblingEngine, live
from tests.control.test_crash_and_resume import check_books, lives

CHUNK = 16
"""Tokens of a chunk of the fake engine."""


def slow(tmp_path: Path, record_tokens: int, kind: type[FakeEngine] = FakeEngine, **flow: object) -> Plan:
    return Plan(
        run_dir=tmp_path,
        steps=6,
        engine=lambda: kind(length=lognormal_lengths(200, 1.0, 900)),
        flow={"record_tokens": record_tokens, **flow},
        run={"checkpoint_every": 3},
    )


@pytest.mark.parametrize("seed", range(8))
def test_run_with_long_answers_crashes_and_every_group_is_trained_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    plan = slow(tmp_path, 32, (FakeEngine, SiblingEngine)[seed % 2], max_age=rng.randrange(3))
    lived, lineage = lives(plan, rng, crashes=5, longest_s=20.0)
    check_books(lived[-1], lineage, 6)
    for batch in lineage.values():
        answers = np.split(batch.versions_N, np.cumsum(batch.lengths_S)[:-1])
        assert all(len(set(versions.tolist())) >= 2 for versions in answers)  # a prompt, and what was sampled


@pytest.mark.parametrize("kind", [FakeEngine, SiblingEngine])
@pytest.mark.parametrize("record_tokens", [16, 64, 0])
def test_crash_costs_each_running_answer_at_most_what_was_agreed(
    tmp_path: Path, record_tokens: int, kind: type[FakeEngine]
) -> None:
    plan = slow(tmp_path, record_tokens, kind)
    first = live(plan, crash_at=15.0)
    books = first.summary.ledger.tokens
    second = live(plan)
    lost = first.summary.tokens_generated + second.summary.tokens_generated - second.summary.ledger.tokens.submitted
    running = 12  # two batches of two groups of three
    assert lost >= 0
    if record_tokens:
        assert books.in_flight > 0
        assert lost <= running * max(record_tokens, CHUNK)
    else:
        assert lost > running * 16


def test_stopped_run_keeps_every_token_that_had_arrived(tmp_path: Path) -> None:
    plan = slow(tmp_path, 512, max_age=2)
    first = live(plan, stop_at=14.0)
    assert first.summary.status == "stopped"
    assert first.summary.tokens_generated == first.summary.ledger.tokens.submitted
    second = live(plan)
    assert second.summary.status == "finished"
    total = first.summary.tokens_generated + second.summary.tokens_generated
    assert total == second.summary.ledger.tokens.submitted


def test_recorded_answers_are_continued_also_where_an_engine_samples_siblings_together(tmp_path: Path) -> None:
    continued: dict[type[FakeEngine], list[int]] = {}

    def remembering(kind: type[FakeEngine]) -> type[FakeEngine]:
        class Remembering(kind):  # type: ignore[misc, valid-type]
            def generate(self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN) -> Any:
                if options.answer_ids_T is not None:
                    continued.setdefault(kind, []).append(len(options.answer_ids_T))
                return super().generate(prompt_ids_T, sampling, options)

        return Remembering

    for kind in (FakeEngine, SiblingEngine):
        plan = slow(tmp_path / kind.__name__, 16, remembering(kind))
        plan.run_dir.mkdir()
        live(plan, crash_at=6.0)  # before most groups have an answer that has ended
        live(plan)
    assert sorted(continued[SiblingEngine]) == sorted(continued[FakeEngine])
    assert continued[FakeEngine], "answers were running when the first life ended"
