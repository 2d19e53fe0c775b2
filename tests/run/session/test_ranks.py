"""Runs whose learner is spread over several processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.base.clock import RealClock
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from headrace.run.session import load_config
from tests.run.session.runs import components, headrace, make_run, running, shared_buffers, tiny_model, wait_gone
from tests.run.session.serial import SerialLoop

STEPS = 8
SLOW_REWARD = """
    import time

    def reward(completion):
        time.sleep(0.03)
        return sum(character in "01234" for character in completion) / 4
"""


def spread(**ways: int) -> list[str]:
    """The options that cut the learner like this."""
    return [text for name, count in ways.items() for text in ("--set", f"learner.parallel.{name}={count}")]


def a_run(directory: Path, **sections: Any) -> Path:
    model = tiny_model(directory / "tiny", num_kv_heads=2)
    return make_run(
        directory,
        model,
        reward=SLOW_REWARD,
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 0},
        learner={"lr": 3e-3, "eps": 1e-5, "tokens_per_microbatch": 20},
        run={"dir": "run", "steps": STEPS, "checkpoint_every": 2},
        **sections,
    )


def kill_a_rank(run_file: Path, role: str, *arguments: str, after: int) -> None:
    """The run must end within seconds, name the rank, and leave nothing behind."""
    clock = RealClock()
    with running("train", run_file, *arguments) as life:
        life.until_step(after)
        pids = components(run_file.parent / "run")
        killed_s = clock.now()
        os.kill(pids[role], signal.SIGKILL)
        words = life.rest()
        assert clock.now() - killed_s < 5.0
        assert life.process.returncode == 1
    assert f"error: {role} (pid {pids[role]}) was killed by SIGKILL" in words
    assert "Traceback" not in words
    assert wait_gone(list(pids.values()), timeout_s=0.0) == []
    assert not shared_buffers(life.process.pid)


def furthest(one: Path, other: Path) -> float:
    """The largest difference of any weight of two model directories."""
    first, second = (weight_tensors(load_model(ModelConfig(path=str(path)))) for path in (one, other))
    return max(float((first[name] - second[name]).detach().abs().max()) for name in first)


def assert_ends_like_one_process(run_file: Path) -> None:
    run_dir = run_file.parent / "run"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["ledger"]["groups"] == {"submitted": 16, "trained": 16, "dropped": {}, "in_flight": 0}
    torch.set_num_threads(1)
    serial = run_file.parent / "serial"
    SerialLoop(load_config(run_file), run_file.parent / "buffer").train(serial)
    assert furthest(run_file.parent / "model", serial) > 1e-3
    assert furthest(run_dir / "checkpoints" / f"step-{STEPS:06d}", serial) < 1e-5


@pytest.mark.slow
def test_a_rank_is_killed_and_the_run_goes_on_cut_otherwise_to_the_weights_of_one_process(tmp_path: Path) -> None:
    run_file = a_run(tmp_path)
    kill_a_rank(run_file, "learner-1", *spread(data=2), after=3)
    done = headrace("train", run_file, "--resume", *spread(tensor=2))
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stdout
    assert set(components(tmp_path / "run")) == {"controller", "engine", "learner", "learner-1", "scorer-0"}
    assert_ends_like_one_process(run_file)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_from_four_ranks_to_two_to_one(tmp_path: Path) -> None:
    run_file = a_run(tmp_path, sync={"transport": "group"})
    kill_a_rank(run_file, "learner", *spread(data=2, tensor=2), after=3)
    kill_a_rank(run_file, "learner-1", "--resume", *spread(context=2), after=5)
    done = headrace("train", run_file, "--resume")
    assert done.returncode == 0, done.stderr
    assert_ends_like_one_process(run_file)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_adapter_is_trained_by_two_ranks_killed_and_goes_on_by_one_to_what_one_process_trains(
    tmp_path: Path,
) -> None:
    run_file = a_run(tmp_path, sync={"codec": "adapter"})
    adapter = ["--set", "model.lora.rank=4"]
    kill_a_rank(run_file, "learner-1", *adapter, *spread(data=2), after=3)
    saved = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert (saved / "adapter_model.safetensors").exists()
    assert not list(saved.glob("model*.safetensors"))
    for ways in ({"tensor": 2}, {}):
        arguments = ["--resume", *adapter, *spread(**ways), *(() if not ways else ("--set", "run.steps=6"))]
        done = headrace("train", run_file, *arguments)
        assert done.returncode == 0, done.stderr
    torch.set_num_threads(1)
    serial = SerialLoop(load_config(run_file, ["model.lora.rank=4"]), tmp_path / "buffer")
    start = {name: tensor.detach().clone() for name, tensor in weight_tensors(serial.learner.model).items()}
    serial.train(tmp_path / "serial")
    found = load_file(tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}" / "adapter_model.safetensors")
    for name, tensor in weight_tensors(serial.learner.model).items():
        torch.testing.assert_close(found[f"base_model.model.{name}"], tensor.detach(), rtol=0, atol=1e-5, msg=name)
    assert any(
        (tensor - start[name]).abs().max() > 1e-3 for name, tensor in weight_tensors(serial.learner.model).items()
    )


def test_ranks_that_the_heads_cannot_be_dealt_to_are_refused_before_anything_starts(tmp_path: Path) -> None:
    done = headrace("train", a_run(tmp_path), *spread(tensor=3))
    assert done.returncode != 0
    assert "learner.parallel.tensor=3 does not fit" in done.stderr
    assert "remedy: set learner.parallel.tensor to a divisor of 2" in done.stderr
    assert not (tmp_path / "run" / "logs" / "learner.log").exists()
