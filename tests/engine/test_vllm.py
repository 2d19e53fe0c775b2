"""The real vLLM, on a processor, from an environment of its own.

``HEADRACE_VLLM`` names its interpreter; docs/engines.md says how such an environment is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.served.config import ServerConfig
from headrace.models.tiny import make_tiny
from headrace.recipes.demo import build_demo
from headrace.session import load_config, train
from headrace.testing.engine_contract import CLAUSES, Clause, keep
from headrace.testing.engine_report import SPEC
from headrace.testing.engine_rig import Rig, served_rig

PYTHON = os.environ.get("HEADRACE_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_VLLM does not name an interpreter that has vLLM"),
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    model, scratch = make_tiny(tmp_path_factory.mktemp("model") / "m", SPEC), tmp_path_factory.mktemp("s")
    with served_rig("vllm", ServerConfig(python=PYTHON, wait_s=900), model, scratch) as made:
        yield made


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.name)
def test_vllm_keeps_what_it_promises_and_refuses_the_rest(clause: Clause, rig: Rig) -> None:
    keep(clause, rig)


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
