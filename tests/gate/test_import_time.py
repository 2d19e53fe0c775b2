"""``import headrace`` is quick and brings no torch."""

import subprocess
import sys

import pytest

MEASURE = """
import sys, time
started = time.perf_counter()
import {module}
print(time.perf_counter() - started, *({{"torch", "transformers", "matplotlib"}} & sys.modules.keys()))
"""


def heavy_and_seconds(module: str) -> tuple[set[str], float]:
    """What ``import module`` brought, and how long it took in a fresh interpreter."""
    command = [sys.executable, "-c", MEASURE.format(module=module)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return set(out[1:]), float(out[0])


def test_package_is_imported_quickly_and_without_torch() -> None:
    runs = [heavy_and_seconds("headrace") for _ in range(3)]
    assert runs[0][0] == set()
    assert min(seconds for _, seconds in runs) < 0.7


def test_program_answers_without_torch() -> None:
    pytest.importorskip("headrace.run.cli", reason="the program is not there yet")
    heavy, _ = heavy_and_seconds("headrace.run.cli")
    assert heavy == set()


def test_measurement_sees_torch_where_it_is_imported() -> None:
    heavy, _ = heavy_and_seconds("torch")
    assert "torch" in heavy


@pytest.mark.parametrize("module", ["session.exporting", "session.directory", "session.training", "session.evaluating"])
def test_verbs_of_the_controller_need_neither_torch_nor_transformers(module: str) -> None:
    heavy, _ = heavy_and_seconds(f"headrace.{module}")
    assert heavy == set()
