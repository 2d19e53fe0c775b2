"""What processes are told by their environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.base.environ import apply_engine_environment, engine_environment, program_environment, thread_times_ns
from headrace.launch.starts import EngineStart, ScorerStart, extra_environment

ENGINE = EngineStart(model={}, engine={}, max_context=8, num_threads=1)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)


def test_only_engines_are_told_how_long_the_threads_of_torch_may_spin() -> None:
    assert extra_environment(ENGINE) == engine_environment() == {"GOMP_SPINCOUNT": "2000"}
    assert extra_environment(ScorerStart(reward={})) == {}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "active" if name == "OMP_WAIT_POLICY" else "7")
    assert engine_environment() == {}


def test_a_program_inherits_no_key_of_our_servers_but_the_one_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_VIEW_TOKEN", "HEADRACE_SERVE_TOKEN", "MY_TOKEN"):
        monkeypatch.setenv(name, "secret")
    found = program_environment({"HEADRACE_SERVE_TOKEN": "given"})
    assert "HEADRACE_VIEW_TOKEN" not in found
    assert (found["HEADRACE_SERVE_TOKEN"], found["MY_TOKEN"]) == ("given", "secret")


def test_a_process_that_becomes_an_engine_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_engine_environment()
    assert os.environ["GOMP_SPINCOUNT"] == "2000"


def test_a_process_that_ends_while_its_threads_are_listed_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert sys.platform != "linux" or thread_times_ns(ending.pid)

    listed = os.listdir

    def list_after_its_end(path: str) -> list[str]:
        ending.communicate(b"\n")
        return listed(path)

    monkeypatch.setattr(os, "listdir", list_after_its_end)
    assert thread_times_ns(ending.pid) == {}
