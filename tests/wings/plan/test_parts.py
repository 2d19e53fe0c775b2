"""The map of a dry run: every part, where it runs, and the memory that it takes there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.models import ModelConfig, load_model
from headrace.run.session import load_config
from headrace.run.session.explain import make_previews
from headrace.run.session.prepare import Inputs, Prepared, prepare
from headrace.wings.plan.parts import MappedPart, map_parts, parts_table
from tests.run.session.runs import make_run, tiny_model

Prepare = Callable[..., Prepared]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_heads=4, num_kv_heads=2)


@pytest.fixture
def prepared(tmp_path: Path, model: Path) -> Prepare:
    def of(*overrides: str, gpus: int = 0, **files: Any) -> Prepared:
        if not (run_file := tmp_path / "work" / "run.toml").exists():
            make_run(run_file.parent, model, **files)
        return prepare(load_config(run_file, overrides), Inputs(gpus=gpus))

    return of


def named(prepared: Prepared) -> dict[str, MappedPart]:
    return {part.name: part for part in map_parts(prepared)}


def test_weights_and_cache_are_those_of_the_loaded_model(prepared: Prepare, model: Path) -> None:
    made = prepared(env={"kind": "rollout", "entry": "reward.py:reward", "reward": "", "workers": 2})
    parts, params = named(made), sum(each.numel() for each in load_model(ModelConfig(path=str(model))).parameters())
    assert list(parts) == ["controller", "learner", "engine", "environment x 2"]
    assert parts["learner"].devices == parts["engine"].devices == "1 thread"
    learner = parts["learner"].bytes_by_use
    assert learner["weights"] == learner["optimizer"] / 2 == pytest.approx(4 * params, rel=0.02)
    assert learner["gradients"] >= learner["weights"]
    assert learner["activations"] > 0
    engine = parts["engine"].bytes_by_use
    assert engine["weights"] == pytest.approx(2 * 4 * params, rel=0.02)
    layers, kv_heads, head, slots = 2, 2, 8, 16
    assert engine["cache up to"] == 2 * layers * kv_heads * head * 4 * slots * made.max_context
    assert "part " in parts_table(made)
    assert parts_table(made) in make_previews(made)


def test_ranks_share_what_is_sharded_and_copies_keep_all(prepared: Prepare) -> None:
    assert list(named(prepared())) == ["controller", "learner", "engine", "scorer reward"]
    alone = named(prepared())["learner"].bytes_by_use
    for overrides, ways in ((["learner.parallel.data=2"], 2), (["learner.parallel.replicate=2"], 1)):
        parts = named(prepared(*overrides))
        assert list(parts)[1:3] == ["learner", "learner-1"]
        for rank in ("learner", "learner-1"):
            kept = parts[rank].bytes_by_use
            assert kept["optimizer"] == alone["optimizer"] / ways
            assert kept["gathered"] > 0
    for way in ("context", "tensor"):
        shared = named(prepared(f"learner.parallel.{way}=2"))["learner-1"].bytes_by_use
        assert shared["activations"] < alone["activations"]


def test_an_adapter_alone_has_gradients_and_no_second_copy_of_the_base(prepared: Prepare) -> None:
    plain, adapted = named(prepared()), named(prepared("model.lora.rank=4"))
    assert 0 < adapted["learner"].bytes_by_use["gradients"] < plain["learner"].bytes_by_use["gradients"] / 2
    assert adapted["engine"].bytes_by_use["weights"] < 0.8 * plain["engine"].bytes_by_use["weights"]
    alone, ranked = (
        named(prepared("model.lora.rank=4", *more))["learner"].bytes_by_use
        for more in ([], ["learner.parallel.data=2"])
    )
    assert (ranked["gradients"], ranked["optimizer"]) == (alone["gradients"], alone["optimizer"])
    base = plain["learner"].bytes_by_use["weights"]
    assert ranked["weights"] == pytest.approx(alone["weights"] - base / 2)


def test_gpus_have_the_names_of_the_driver_where_these_differ(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parts = named(prepared("engine.count=2", gpus=3))
    assert [parts[name].devices for name in ("learner", "engine-0", "engine-1")] == ["cuda:0", "cuda:2", "cuda:1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab12,6")
    parts = named(prepared("engine.count=2", gpus=3))
    shown = [parts[name].devices for name in ("learner", "engine-0", "engine-1")]
    assert shown == ["cuda:0 (GPU 4)", "cuda:2 (GPU 6)", "cuda:1 (GPU GPU-ab12)"]


def test_seconds_of_an_update_follow_from_the_tokens_of_a_batch(prepared: Prepare) -> None:
    def update_of(*overrides: str) -> tuple[float, float]:
        found = re.search(
            r"An update of the weights: about ([\d.e-]+) s for ([\d,]+) tokens", parts_table(prepared(*overrides))
        )
        assert found
        return float(found[1]), float(found[2].replace(",", ""))

    seconds, tokens = update_of("launch.learner_threads=1")
    assert seconds > 0 < tokens
    double = update_of("launch.learner_threads=1", "flow.group_size=8")
    assert double[1] > tokens
    assert double[0] > seconds


def test_memory_of_several_devices_is_told_of_each() -> None:
    part = MappedPart(
        name="engine", devices="cuda:0,1", num_devices=2, bytes_by_use={"weights": 5e9, "cache up to": 1e9}
    )
    assert part.memory() == "3.0 GB on each: weights 2.5 GB, cache up to 500.0 MB"


def test_a_model_whose_sizes_are_not_known_is_mapped_without_memory(prepared: Prepare, tmp_path: Path) -> None:
    made = prepared()
    (tmp_path / "config.json").write_text('{"model_type": "strange"}')
    parts = named(replace(made, config=load_config(made.config, [f"model.path={tmp_path}"])))
    assert parts["learner"].memory() == parts["engine"].memory() == ""


def test_the_weights_on_their_way_are_told_in_one_line(
    prepared: Prepare, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sync.estimate._hash_s", lambda clock: 3.3554432)  # 10 MB/s
    params = sum(each.numel() for each in load_model(ModelConfig(path=str(model))).parameters())

    def told(*overrides: str) -> str:
        (line,) = (
            each for each in parts_table(prepared(*overrides)).splitlines() if "A version of the weights" in each
        )
        return line.strip()

    size = f"{4 * params / 1e6:.2g} MB"
    assert told().startswith(f"A version of the weights: {size} by shm, {4 * params / 1e7:.2g} s at least (to hash it")
    assert "; deadline 60 s; 2 lie in " in told()
    cast = told("sync.transport=http", "sync.codec=cast_bf16", "sync.network_gb_s=0.001")
    assert f"{2 * params / 1e6:.2g} MB by http" in cast
    assert f"({2 * params / 1e6:.2g} s at sync.network_gb_s, " in cast
    assert " lie in " not in cast
    assert "3 lie in " in told("sync.transport=files")
