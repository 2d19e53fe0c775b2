"""Whole runs through every way for weights to travel: what is lossless changes no bit of what is learned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from headrace.base.types.messages.engine import Commit, Stage
from headrace.base.types.messages.learner import Publish
from headrace.launch.channel import ControllerChannel
from tests.run.session.runs import make_run, tiny_model, verb

WAYS = [
    *(("http", "delta"), ("group", "full"), ("files", "delta"), ("shm", "delta")),
    *(("files", "full"), ("http", "full"), ("group", "delta")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


def learned(directory: Path, model: Path, lora: bool = False, **sync: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The summary, and the last weights."""
    sections: dict[str, Any] = {"sync": sync, "flow": {"groups_per_step": 2, "group_size": 4, "max_age": 0}}
    run_file = make_run(directory, model, **sections)
    given = ["--set", "model.lora.rank=4"] if lora else []
    verb("train", run_file, *given)
    summary = json.loads((directory / "run" / "summary.json").read_text())
    last = max((directory / "run" / "checkpoints").iterdir())
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    weights = {name: array.tobytes() for name, array in load_file(next(last.rglob(name))).items()}
    assert not list((directory / "run" / "weights").glob("*")), "weights are left"
    return summary, weights


@contextmanager
def counted_orders() -> Iterator[Counter[type]]:
    """The number of messages of each type that controllers send to their parts in the body."""
    ordered = Counter[type]()
    send = ControllerChannel.send

    def counted(channel: ControllerChannel, message: object) -> None:
        ordered[type(message)] += 1
        send(channel, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControllerChannel, "send", counted)
        yield ordered


@pytest.fixture(scope="module")
def usual_with_orders(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[tuple[dict[str, Any], dict[str, bytes]], Counter[type]]:
    """What is learned with the settings of every day, and the orders that the controller has given."""
    with counted_orders() as ordered:
        return learned(tmp_path_factory.mktemp("usual") / "run", model), ordered


@pytest.fixture
def usual(
    usual_with_orders: tuple[tuple[dict[str, Any], dict[str, bytes]], Counter[type]],
) -> tuple[dict[str, Any], dict[str, bytes]]:
    return usual_with_orders[0]


@pytest.mark.parametrize(
    ("transport", "codec"),
    [WAYS[0], *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[1:])],
)
def test_lossless_way_learns_bit_for_bit_the_same(
    tmp_path: Path, model: Path, usual: tuple[dict[str, Any], dict[str, bytes]], transport: str, codec: str
) -> None:
    summary, weights = learned(tmp_path / "run", model, transport=transport, codec=codec)
    assert weights == usual[1]
    assert summary["versions"] == usual[0]["versions"]
    assert summary["warnings"] == usual[0]["warnings"]


def test_versions_come_into_use_without_orders_of_the_controller(
    usual_with_orders: tuple[tuple[dict[str, Any], dict[str, bytes]], Counter[type]],
) -> None:
    (summary, _), ordered = usual_with_orders
    assert summary["versions"] == [0, 3]
    assert (ordered[Publish], ordered[Stage], ordered[Commit]) == (4, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("interrupt", "num_commits"), [("drain", 0), ("sleep", 4)])
def test_only_an_engine_that_sleeps_is_ordered_to_use_versions(
    tmp_path: Path, model: Path, interrupt: str, num_commits: int
) -> None:
    with counted_orders() as ordered:
        summary, _ = learned(tmp_path / "run", model, interrupt=interrupt)
    assert summary["versions"] == [0, 3]
    assert (ordered[Publish], ordered[Stage], ordered[Commit]) == (4, 0, num_commits)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["adapter", "delta"])
@pytest.mark.parametrize("transport", ["shm", "http"])
def test_adapters_travel_alone(tmp_path: Path, model: Path, transport: str, codec: str) -> None:
    usual = learned(tmp_path / "usual", model, lora=True)[1]
    assert learned(tmp_path / "run", model, lora=True, transport=transport, codec=codec)[1] == usual


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["cast_bf16", "cast_fp8"])
def test_rounded_weights_train_and_the_mismatch_is_told(tmp_path: Path, model: Path, codec: str) -> None:
    summary, _ = learned(tmp_path / "run", model, transport="shm", codec=codec)
    assert 1e-6 < summary["mismatch_abs"] < 0.3
