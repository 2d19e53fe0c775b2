"""The history of answers outlives its process, and nothing in its file can do harm."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.native.history import HistoryIndex
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, joined, make_engine, request, run
from tests.engine.native.test_history import KEY, OTHER, add, drafted
from tests.engine.native.test_speculation import PEAKED, Dir, bits, needs_kernels, speculation_of

ROOT = Path(__file__).parents[3]
VOCAB = 200
KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.engine.native.history import HistoryIndex
from tests.engine.native.test_history import KEY, add
add(HistoryIndex(1024, Path(sys.argv[1]), 200), KEY, [1, 2, 3], list(range(10, 30)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_answers_of_a_process_that_was_killed_are_found_by_the_next(tmp_path: Path) -> None:
    file = tmp_path / "answers.bin"
    died = subprocess.run([sys.executable, "-c", KILLED, str(file)], cwd=ROOT, check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    index = HistoryIndex(1024, file, VOCAB)
    assert (index.store.num_found, index.store.num_damaged) == (20, 0)
    assert index.knows(KEY)
    assert drafted(index, KEY, [1, 2, 3]) == [[10, 11, 12, 13]] * 3
    add(index, OTHER, [4, 5, 6], list(range(40, 60)))  # after the others, not over them
    assert drafted(index, KEY, [1, 2, 3]) == [[10, 11, 12, 13]] * 3
    again = HistoryIndex(1024, file, VOCAB)
    assert again.store.num_found == 40
    assert drafted(again, OTHER, [4, 5, 6]) == [[40, 41, 42, 43]] * 3


@pytest.mark.parametrize("change", ["size", "cut", "form", "empty"])
def test_a_file_of_another_form_is_begun_anew(tmp_path: Path, change: str) -> None:
    file = tmp_path / "deep" / "answers.bin"
    add(HistoryIndex(2048 if change == "size" else 1024, file, VOCAB), KEY, [1, 2, 3], list(range(10, 30)))
    if change == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif change == "form":
        with file.open("r+b") as opened:
            opened.write(b"something else")
    elif change == "empty":
        file.write_bytes(b"")
    index = HistoryIndex(1024, file, VOCAB)
    assert (index.store.num_found, index.store.num_damaged) == (0, 0)
    assert not index.knows(KEY)
    assert drafted(index, KEY, [1, 2, 3]) == [[], [], []]
    add(index, KEY, [1, 2, 3], list(range(10, 30)))
    assert HistoryIndex(1024, file, VOCAB).store.num_found == 20


@pytest.mark.parametrize("seed", range(20))
def test_what_cannot_be_an_entry_is_counted_and_left_out(tmp_path: Path, seed: int) -> None:
    rng, file = np.random.default_rng(seed), tmp_path / "answers.bin"
    index = HistoryIndex(1024, file, VOCAB)
    for _ in range(40):
        add(index, KEY, [1, 2], rng.integers(0, VOCAB, 30).tolist())
    content = bytearray(file.read_bytes())
    for place in rng.integers(24, len(content), 4000):
        content[place] = rng.integers(256)
    file.write_bytes(content)
    store = HistoryIndex(1024, file, VOCAB).store
    assert store.num_damaged > 100
    assert ((store.ids_P >= -1) & (store.ids_P < VOCAB)).all()
    assert ((store.chances_P >= 0) & (store.chances_P <= 1)).all()
    assert ((store.places_S >= 0) & (store.places_S < 1024)).all()
    assert 0 <= store.head_1[0] < 1024
    assert HistoryIndex(1024, file, VOCAB).store.num_damaged == 0, "it was not mended"


@needs_kernels
def test_an_engine_drafts_from_the_answers_of_the_one_before_it_and_answers_the_same(
    model_dir: Dir, tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")), deterministic=True)
    weights = Weights(config, tmp_path / "buffer")
    weights.scale(PEAKED)
    asked = [request(number, [5, 6, 7 + number], seed=number, max_new_tokens=24) for number in range(4)]
    found = []
    for history in (None, tmp_path / "answers.bin", tmp_path / "answers.bin"):
        engine = make_engine(config, speculation="off" if history is None else "history", history=history)
        weights.stage(engine, 0)
        engine.commit(0)
        found.append([bits(joined(chunks)) for _, chunks in sorted(run(engine, asked).items())])
        drafts = None if history is None else speculation_of(engine)
    assert found[0] == found[1] == found[2]
    assert drafts is not None
    assert drafts.history.store.num_found > 60
    assert drafts.num_accepted > 60
    assert engine.facts()["history_tokens_found"] == drafts.history.store.num_found


def test_without_room_on_the_disk_the_history_is_in_memory_and_that_is_said(
    model_dir: Dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    file = tmp_path / "answers.bin"
    engine = make_engine(ModelConfig(path=str(model_dir("qwen3"))), speculation="history", history=file)
    assert "kept in memory alone, and ends with this process: [Errno 28] No space left" in capfd.readouterr().err
    assert not file.exists()
    assert speculation_of(engine).history.store.num_found == 0
