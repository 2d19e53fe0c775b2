"""Every format takes changed inputs by name or refuses them; what would break, or be forged, is noticed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lab.fuzz import run as fuzz
from lab.fuzz.change import mutate, mutate_json, mutate_msgpack
from lab.fuzz.formats import Format, byte_formats
from lab.fuzz.weights import ForgedInput

torch.set_num_threads(1)
EACH = 150


def test_changed_inputs_of_every_format_are_taken_or_refused_and_nothing_breaks(tmp_path: Path) -> None:
    every = byte_formats(tmp_path)
    assert len(every) >= 13
    for what in every:
        counted = fuzz._read_all(what, EACH, "tests")
        assert (counted.crashes, counted.forged) == (0, 0), counted.problems
        assert counted.accepted + counted.refused == EACH
        assert counted.refused > EACH // 3


def test_inputs_are_those_of_the_seed() -> None:
    def inputs(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        data = b'{"a": [1, {"b": "text"}]}'
        return [change(rng, data, [data]) for change in (mutate, mutate_json) * 50]

    assert inputs(1) == inputs(1) != inputs(2)
    assert len(set(inputs(1))) > 80


@pytest.mark.parametrize(("error", "kind"), [(ForgedInput("taken"), "forged"), (IndexError("broken"), "crashes")])
def test_a_reader_that_breaks_or_takes_what_nobody_sent_is_counted_and_shown(error: Exception, kind: str) -> None:
    def read(data: bytes) -> bool:
        if data != b"sound":
            raise error
        return True

    def once(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        return mutate(rng, data, others) if rng.random() < 0.5 else data

    counted = fuzz._read_all(Format(name="x", share=1, seeds=[b"sound"], change=once, read=read), 100, "0")
    assert getattr(counted, kind) > 20
    assert counted.accepted > 20
    assert str(error) in counted.problems[0]


def test_a_receiver_that_checks_no_hashes_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sync.receiver.Receiver._verify", lambda self, update, image: None)
    (whole,) = [what for what in byte_formats(tmp_path) if what.name == "weights as a whole"]
    assert fuzz._read_all(whole, EACH, "tests").forged > 0


def test_changes_of_a_tree_leave_the_sound_one_as_it_is() -> None:
    data = b"\x81\xa1a\x93\x01\x02\xa1b"
    for seed in range(200):
        mutate_msgpack(random.Random(seed), data, [data])
    assert data == b"\x81\xa1a\x93\x01\x02\xa1b"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_servers_come_through_thousands_of_changed_requests() -> None:
    said: list[str] = []
    made = fuzz.measure(said.append, runs=20_000, seed=7)
    assert all(target.holds for target in made.targets), said
    assert sum(row["inputs"] for row in made.rows) >= 20_000
