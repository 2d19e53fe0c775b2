"""The real vLLM, on a processor, from an environment of its own.

``HEADRACE_VLLM`` names its interpreter; docs/engines.md says how such an environment is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from headrace.engine.capabilities import Capabilities
from headrace.engine.config import ENGINES
from headrace.models.devices import CPU
from headrace.run.session import load_config, train
from headrace.testing.engine_contract import SUITES, Suite, run_clause
from headrace.testing.engine_rig import Rig, served_rig
from headrace.testing.interpreted import write_interpreter
from headrace.wings.recipes.demo import build_demo
from headrace.wings.servers.client.config import ServerConfig

PYTHON = os.environ.get("HEADRACE_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_VLLM does not name an interpreter that has vLLM"),
]


NEWER = ENGINES.load("vllm").capabilities.on(CPU)
OLDER = replace(NEWER, kept_sets=False, routing=False)
"""What the model runner tells that vLLM uses on processors."""


@contextmanager
def kept(suite: Suite, server: ServerConfig, can: Capabilities, directory: Path) -> Iterator[Rig]:
    wanted, scratch = suite.requirements(directory / "m", can), directory / "s"
    scratch.mkdir()
    with served_rig("vllm", server, wanted, scratch) as rig:
        yield rig


@pytest.mark.parametrize("weights_by", ["files", "gloo"])
@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_vllm_keeps_what_it_promises_and_refuses_the_rest(
    suite: Suite, weights_by: Literal["files", "gloo"], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    with kept(suite, ServerConfig(python=PYTHON, wait_s=900, weights_by=weights_by), OLDER, tmp_path) as rig:
        for clause in suite.clauses:
            with subtests.test(clause.name):
                run_clause(clause, rig)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_vllm_whose_kernels_are_interpreted_tells_kept_sets_and_experts(
    suite: Suite, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    server = ServerConfig(python=write_interpreter(PYTHON, tmp_path), wait_s=900)
    with kept(suite, server, NEWER, tmp_path) as rig:
        for clause in suite.clauses:
            with subtests.test(clause.name):
                run_clause(clause, rig)


def test_demo_learns_with_vllm_as_its_engine(tmp_path: Path) -> None:
    demo = build_demo(tmp_path, seed=0)
    settings = (
        *("engine.kind=vllm", f"engine.server.python={PYTHON}", "engine.server.wait_s=900"),
        *("launch.start_timeout_s=930", "run.steps=60", f"run.dir={tmp_path / 'run'}", "observe.view=none"),
    )
    summary = train(load_config(demo.run_file, settings))
    assert summary.eval_before < 0.6
    assert summary.eval_after > 0.8
    assert summary.mismatch_abs < 1e-4
    groups = summary.ledger.groups
    assert (groups.submitted, groups.dropped) == (groups.trained, {})
