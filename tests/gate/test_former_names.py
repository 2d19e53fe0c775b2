"""Modules that have moved are found under their former names, and are the same modules."""

import importlib
import subprocess
import sys

import pytest

from headrace.base.former import FORMER, current

DOCUMENTED = [
    "algo.base", "algo.formulas", "bridges.atropos", "bridges.mcp", "bench.base", "clock", "config",
    "control.summary", "engine.base", "env.interface", "env.policy", "errors", "flow", "flow.filters.base",
    "flow.ledger", "flow.policies.base", "learner.adapters", "models.tiny", "observe", "observe.metrics", "plan",
    "plan.costs", "policy", "recipes.demo", "recipes.demo.reward", "scoring", "session", "session.checking",
    "sync.base", "sync.manifest", "testing", "scoring.sandbox", "testing.engine_contract", "testing.engine_report",
    "testing.interpreted", "testing.ledgers", "testing.sync", "types.chat", "types.metrics", "types.observation",
    "types.weights",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted({*DOCUMENTED, *FORMER}))
def test_module_is_the_same_under_its_former_name(name: str) -> None:
    former = importlib.import_module(f"headrace.{name}")
    now = current(f"headrace.{name}") or f"headrace.{name}"
    assert former is importlib.import_module(now)
    assert former.__name__ == now
    assert former.__spec__ is not None
    assert former.__spec__.name == now


@pytest.mark.parametrize(
    "code",
    [
        "import headrace.types.tokens as a; import headrace.base.types.tokens as b; assert a is b",
        "from headrace.types import tokens as a; from headrace.base.types import tokens as b; assert a is b",
        "import headrace.errors; assert headrace.errors.ConfigError is headrace.base.errors.ConfigError",
        "from headrace.env.policy import Episode, Policy; import headrace; assert headrace.Episode is Episode",
        "import sys, headrace.session; assert 'torch' not in sys.modules",
    ],
)
def test_former_names_come_first_in_a_fresh_interpreter(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_module_is_still_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"headrace\.types\.nothing|headrace\.base\.types\.nothing"):
        importlib.import_module("headrace.types.nothing")
