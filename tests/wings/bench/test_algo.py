"""The benchmark of the objective, cut down."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.base.errors import ConfigError
from headrace.models.tiny import TinySpec
from headrace.wings.bench import algo, run_benchmark


def test_every_case_is_measured_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algo, "SAMPLES", 8)
    monkeypatch.setattr(algo, "REPEATS", 1)
    monkeypatch.setattr(algo, "TINY", TinySpec(vocab=algo.TINY.vocab))
    threads, told = torch.get_num_threads(), list[str]()
    try:
        report = run_benchmark("algo", told.append)
    finally:
        torch.set_num_threads(threads)
    assert told == [row["what"] for row in report.rows] == list(algo.CASES)
    assert all(0 < row["objective_s"] < row["step_s"] * 10 for row in report.rows)
    assert [target.target for target in report.targets] == ["<= 0.03"] * len(algo.CASES)


def test_batches_have_loss_tokens_behind_every_prompt() -> None:
    batch = algo.make_batch(3)
    assert batch.mask_N.sum() == batch.num_tokens - algo.SAMPLES * algo.PROMPT
    ages = 3 - batch.versions_N[batch.mask_N]
    assert set(np.unique(ages)) == {0, 1, 2}


def test_unknown_benchmark_is_refused() -> None:
    with pytest.raises(ConfigError, match="no benchmark 'algos'"):
        run_benchmark("algos")
