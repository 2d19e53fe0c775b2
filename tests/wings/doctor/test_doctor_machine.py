"""What the examination of a machine and of a directory finds."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.models.tiny import TinySpec, make_tiny
from headrace.run.cli.app import app
from headrace.wings.doctor.directory import examine_directory
from headrace.wings.doctor.machine import MachinePlaces, examine_machine
from headrace.wings.doctor.report import DoctorReport, Fault, Grade

Usage = namedtuple("Usage", "total used free")


def machine(root: Path, files: dict[str, str] | None = None, gpus: int = 0) -> DoctorReport:
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for number in range(gpus):
        (root / "proc/driver/nvidia/gpus" / f"0000:{number:02}:00.0").mkdir(parents=True)
    return examine_machine(RealClock(), MachinePlaces(root=root, shared=root, cache=root / "cache"))


def level(report: DoctorReport, name: str) -> Grade:
    (found,) = [each.level for each in report.findings if each.name == name]
    return found


def test_a_machine_tells_everything_that_is_looked_at(tmp_path: Path) -> None:
    report = machine(tmp_path)
    names = {"processors", "memory", "shared memory", "GPUs", "compiler", "python", "packages", "extras"}
    assert {each.name for each in report.findings} >= names | {"open files", "cache", "clock"}
    assert all(each.remedy for each in report.findings if each.level in (Grade.WARN, Grade.FAIL))
    assert "torch 2." in str(report)
    assert report.faults == []


def test_full_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**34, 2**34 - 2**20, 2**20))
    report = machine(tmp_path)
    assert report.faults == [Fault.FULL_SHARED_MEMORY]
    assert not report.ok
    assert "remove what ended runs left" in str(report)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))  # what docker gives by default
    report = machine(tmp_path)
    assert (report.faults, level(report, "shared memory")) == ([], Grade.WARN)


@pytest.mark.parametrize(
    ("visible", "hidden"), [(None, 0), ("0,1", 0), ("1", 1), ("", 2), ("-1", 2), ("0,0", 1), ("0,7", 1)]
)
def test_a_hidden_gpu_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, hidden: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    report = machine(tmp_path, gpus=2)
    assert report.faults == ([Fault.HIDDEN_GPU] if hidden else [])
    assert not hidden or f"hides {hidden}" in str(report)


def test_limits_of_a_control_group_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.wings.doctor.machine.num_cores", lambda: 8)
    report = machine(tmp_path, {"sys/fs/cgroup/cpu.max": "150000 100000", "sys/fs/cgroup/memory.max": str(2**30)})
    assert level(report, "processors") is Grade.WARN
    assert "the time of 1.5" in str(report)
    assert "1.0 GiB" in str(report)
    assert level(report, "memory") is Grade.WARN
    report = machine(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"})
    assert level(report, "processors") is Grade.OK


def test_what_is_missing_is_told_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.wings.doctor.machine.find_compiler", lambda: None)
    monkeypatch.setattr("headrace.wings.doctor.machine.metadata.requires", lambda _: ["torch>=99", "numpy>=1"])
    (tmp_path / "cache").write_text("a file where the folder should be")
    report = machine(tmp_path)
    assert level(report, "compiler") is Grade.WARN
    assert level(report, "torch") is Grade.FAIL
    assert "pip install 'torch>=99'" in str(report)
    assert level(report, "cache") is Grade.WARN


def test_a_directory_whose_parts_do_not_fit_is_told(tmp_path: Path) -> None:
    spec = TinySpec(vocab="abcdef[]user", hidden_size=16, num_heads=2, num_kv_heads=1, chat_template="[{{ 'user' }}]")
    good = make_tiny(tmp_path / "good", spec)
    assert [each.level for each in examine_directory(good).findings] == [Grade.OK] * 4
    strange = make_tiny(tmp_path / "strange", TinySpec(vocab="abc", hidden_size=16, num_heads=2, chat_template="XYZ"))
    assert examine_directory(strange).faults == [Fault.OTHER_TEMPLATE]
    config = json.loads((good / "config.json").read_text())
    (good / "config.json").write_text(json.dumps({**config, "vocab_size": 5}))
    (good / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 1}))
    report = examine_directory(good)
    assert report.faults == [Fault.TRUNCATED_VOCABULARY]
    assert "temperature=0.6" in str(report)
    os.remove(good / "config.json")
    assert not examine_directory(good).ok


def test_the_verb_says_what_it_needs(tmp_path: Path) -> None:
    for arguments, words in (
        (["http://127.0.0.1:1"], "--model DIR"),
        ([str(tmp_path), "--model", "x"], "are for a server"),
        (["--dtype", "int4"], "choose auto"),
    ):
        said = CliRunner().invoke(app, ["doctor", *arguments])
        assert isinstance(said.exception, ConfigError)
        assert words in str(said.exception)
    model = make_tiny(tmp_path / "m", TinySpec(vocab="abc", hidden_size=16, num_heads=2))
    said = CliRunner().invoke(app, ["doctor", str(model), "--json"])
    assert (said.exit_code, json.loads(said.stdout)["ok"]) == (0, True)
