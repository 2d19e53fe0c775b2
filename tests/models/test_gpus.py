"""GPUs keep the names that the driver knows them by, on the way from a cluster to the program that computes on them."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.base.errors import ConfigError
from headrace.base.types.messages.controller import Failure
from headrace.engine import EngineConfig
from headrace.launch.hosts import EXIT_REPORTED
from headrace.launch.hosts import main as hosts_main
from headrace.launch.starts import EngineStart
from headrace.models.devices import Devices, choose_devices
from headrace.models.gpus import VARIABLE, VisibleGpus
from headrace.run.session.config import load_config, make_recorded_settings
from headrace.run.session.directory import CONFIG_FILE, read_settings, write_sealed
from headrace.run.session.engine_fit import refuse_unsupported
from headrace.wings.cluster.ray.fit import choose_ray_devices
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.wire import Address
from headrace.wings.servers.sglang import command as sglang
from headrace.wings.servers.vllm import command as vllm

REQUIRED = ServeRequirements(path="/models/m", dtype="bfloat16", max_context=4096)


@pytest.mark.parametrize(
    ("visible", "device", "shown"),
    [
        (None, "cuda:3", "3"),
        ("4,5,6,7", "cuda:3", "7"),  # half of a node, as Slurm gives it
        ("5", "cuda:0", "5"),  # one GPU, as Ray gives it
        ("6,2", "cuda:0,1", "6,2"),  # in the order of the cluster
        ("GPU-8932f937-d72c,GPU-1e5a", "cuda:1", "GPU-1e5a"),
        ("MIG-c6d4f1ef,MIG-0b", "cuda:0", "MIG-c6d4f1ef"),
    ],
)
@pytest.mark.parametrize("server", [vllm, sglang])
def test_a_server_is_shown_the_gpus_of_its_engine_and_no_other(
    visible: str | None, device: str, shown: str, server: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VARIABLE, visible)
    made, kind = (vllm.command, "vllm") if server is vllm else (sglang.command, "sglang")
    config = EngineConfig.model_validate({"kind": kind, "device": device, "tensor": 1 + device.count(",")})
    started = made(config, REQUIRED, Address(url="http://x", socket="/x/s"))
    assert started.variables[VARIABLE] == shown
    width = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}[kind]
    assert (width in started.argv) == ("," in device)


def test_a_gpu_that_the_process_does_not_see_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"computes on cuda:2, and CUDA_VISIBLE_DEVICES='0,1' shows its process 2"):
        VisibleGpus.read("0,1").driver_names("cuda:1,2")
    assert VisibleGpus.read("0,1,GP7,3").names == ("0", "1")  # the driver reads no further either


def test_gangs_are_neighbours_that_nobody_else_computes_on() -> None:
    made = choose_devices("auto", "auto", ranks=4, gpus=8, count=2, width=2)
    assert made.engines == ("cuda:6,7", "cuda:4,5")
    assert made.learner == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert choose_devices("cuda:2,3", "cuda:0", ranks=1, gpus=4, count=1, width=2).engines == ("cuda:2,3",)
    assert choose_devices("cuda:1,3", "cuda:0", ranks=1, gpus=4, count=2).engines == ("cuda:1", "cuda:3")
    assert choose_devices("auto", "cpu", ranks=1, gpus=0, count=2, width=2).engines == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("engine", "ranks", "count", "width", "words"),
    [
        ("auto", 1, 1, 8, "1 engine of 8 GPUs each .* need 8 GPUs beside the learner's 1, and there are 7"),
        ("auto", 4, 2, 4, "2 engines of 4 GPUs each .* need 8 GPUs beside the learner's 4, and there are 4"),
        ("cuda:0,1", 1, 1, 2, "need 2 GPUs beside the learner's 1, and there are 1"),
        ("cuda:6,7", 1, 1, 4, "names 2 GPUs, and engine.count=1 engines of engine.tensor x engine.pipeline=4 need 4"),
        ("cuda:7,8", 1, 1, 2, "torch sees 8 GPUs"),
        ("cuda:6,7", 1, 1, 1, "names 2 GPUs"),
    ],
)
def test_a_gang_that_does_not_fit_is_refused(engine: str, ranks: int, count: int, width: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_devices(engine, "auto", ranks=ranks, gpus=8, count=count, width=width)


@pytest.mark.parametrize(
    ("engine", "words", "remedy"),
    [
        ({"tensor": 2}, "engine.tensor=2 divides an engine among devices, and engine.kind='native'", "vllm"),
        (
            {"kind": "vllm", "tensor": 2, "server": {"urls": ["http://127.0.0.1:8000"]}},
            "engine.server.urls names some that run",
            "leave them out",
        ),
        ({"kind": "vllm", "device": "cuda:1,1"}, "names each gpu once", ""),
    ],
)
def test_settings_that_contradict_each_other_are_refused(engine: dict[str, object], words: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"engine": engine, "model": {"path": "m"}, "data": {"path": "d"}, "env": {"reward": "r.py:f"}})
    assert words in str(raised.value)
    assert remedy in raised.value.remedy


@pytest.mark.parametrize(
    ("kind", "args", "remedy"),
    [
        ("vllm", ["-tp", "2"], "set engine.tensor"),
        ("vllm", ["--pipeline_parallel_size=2"], "set engine.pipeline"),
        ("sglang", ["--dp-size", "2"], "set engine.count"),
    ],
)
def test_arguments_that_choose_gpus_start_no_server_and_are_read_where_they_are_recorded(
    kind: str, args: list[str], remedy: str, tmp_path: Path
) -> None:
    tree = {"model": {"path": "m"}, "launch": {"start_timeout_s": 400}, "sync": {"interrupt": "drain"}}
    config = load_config({**tree, "engine": {"kind": kind, "server": {"args": args}}})
    with pytest.raises(ConfigError, match=f"engine.server.args holds '{args[0]}'") as raised:
        refuse_unsupported(config, (), Devices(engines=("cuda:0",), learner=("cuda:1",)))
    assert remedy in raised.value.remedy
    write_sealed(tmp_path / CONFIG_FILE, make_recorded_settings(config))
    assert load_config(read_settings(tmp_path)).engine.server == config.engine.server


def test_ray_gives_a_gang_all_of_its_gpus() -> None:
    base = {
        "engine": {"kind": "vllm", "tensor": 4},
        "launch": {"kind": "ray", "ray": {"engine": {"gpus": 4}, "learner": {"gpus": 1}}},
        "sync": {"transport": "http", "interrupt": "drain"},
        "model": {"path": "m"},
        "data": {"path": "d"},
        "env": {"reward": "r.py:f"},
    }
    config = load_config(base)
    assert choose_ray_devices(config.launch, 2, 1).engines == ("cuda:0,1,2,3",) * 2
    for role, amount, words in (("engine", 2, "engine.tensor x engine.pipeline is 4"), ("learner", 2, "each rank")):
        with pytest.raises(ConfigError, match=words) as raised:
            load_config(base, [f"launch.ray.{role}.gpus={amount}"])
        assert f"launch.ray.{role}.gpus = " in raised.value.remedy


def test_a_part_that_fails_names_its_gpu_as_the_driver_does_and_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Failure] = []

    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    start = EngineStart(model={}, engine={"device": "cuda:1"}, max_context=8, num_threads=1)
    monkeypatch.setenv(VARIABLE, "4,5")
    for name, value in {
        "die_with_starter": lambda _: None,
        "read_token": lambda _: None,
        "read_briefing": lambda _: SimpleNamespace(start=start, addresses=()),
        "PartChannel": lambda *_: SimpleNamespace(send=sent.append, close=lambda: None),
        "_resolve_role": lambda _: (None, fail),
        "signal": SimpleNamespace(signal=lambda *_: None, SIGINT=2, SIG_IGN=1),
    }.items():
        monkeypatch.setattr(hosts_main, name, value)
    assert hosts_main.main(tmp_path, "engine-1", 0) == EXIT_REPORTED
    assert sent[0].problem.startswith(f"engine-1 (GPU 5 of {platform.node()}) failed: RuntimeError: CUDA error: ")
