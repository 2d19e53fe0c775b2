"""The program that checks the contract suites on several engines and prints a table: ``python -m
headrace.testing.engine_report``.

Without arguments, it checks the embedded engine and the fakes of vLLM and SGLang. ``--vllm`` and ``--sglang`` name
Python interpreters with the real servers, which are then checked on the CPU, too. ``--write`` replaces the table in a
Markdown page.

A *clause* is one requirement of the contract of engines; a *suite* contains the clauses for one kind of model. A *rig*
is an engine under test with a learner that publishes weights to it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.base.errors import HeadraceError
from headrace.engine.capabilities import Capabilities
from headrace.engine.config import ENGINES
from headrace.models.devices import CPU
from headrace.testing.engine_contract import SUITES, Clause, Suite, run_clause
from headrace.testing.engine_rig import Rig, native_rig, served_rig
from headrace.testing.interpreted import write_interpreter
from headrace.testing.servers import fake_server
from headrace.wings.servers.client.config import ServerConfig
from headrace.wings.servers.client.core import ServedEngine
from headrace.wings.servers.client.launching import ServeRequirements

MARK = "<!-- contract -->"
"""The line before and after the table in a page."""
BROKEN = "BROKEN"
"""The result of a clause that the engine breaks."""
AT_LOAD = "refused at load"
"""The result of a clause about models or settings that the engine does not support, so that a run file with them is
refused when it is loaded."""
_AT_LOAD: dict[str, Callable[[Capabilities], bool]] = {
    "the same bits whatever the batch (`model.deterministic`)": lambda can: can.deterministic,
    "computes in the caller's process (own loop, `headrace serve`)": lambda can: can.embedded,
}
"""Rows of the table about capabilities that are not checked on a running engine, by their names: settings are compared
with these capabilities when a run file is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table: the results of all clauses for one engine."""

    title: str
    """The heading: name and version of the engine, and whether it is the real engine or a fake."""
    capabilities: Capabilities
    """Capabilities of the engine."""
    results: tuple[str, ...]
    """Results (``yes``, ``refused``, ``no``, :data:`AT_LOAD` or :data:`BROKEN`), in the order of the suites and their
    clauses."""


def main(arguments: list[str]) -> int:
    """Run the program with its command-line ``arguments``: check the engines, print the table, and write it to the page
    that ``--write`` names. Return the exit code: 1 if an engine breaks the contract, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default="")
    parser.add_argument("--sglang", default="")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args(arguments)
    columns = list(_columns({"vllm": options.vllm, "sglang": options.sglang}))
    page = table(columns)
    print(page)  # noqa: T201 - a program
    if options.write is not None:
        before, _, after = options.write.read_text(encoding="utf-8").partition(f"{MARK}\n")
        _, _, rest = after.partition(f"{MARK}\n")
        options.write.write_text(f"{before}{MARK}\n{page}{MARK}\n{rest}", encoding="utf-8")
    return int(any(BROKEN in column.results for column in columns))


def table(columns: list[Column]) -> str:
    """Return the table in Markdown, with a row for each clause and a column for each engine."""
    lines = ["| | " + " | ".join(column.title for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    clauses = [clause for suite in SUITES.values() for clause in suite.clauses]
    for place, clause in enumerate(clauses):
        lines.append(f"| {clause.name} | " + " | ".join(column.results[place] for column in columns) + " |")
    for name, is_present in _AT_LOAD.items():
        results = ["yes" if is_present(column.capabilities) else AT_LOAD for column in columns]
        lines.append(f"| {name} | " + " | ".join(results) + " |")
    return "\n".join(lines) + "\n"


def _columns(pythons: dict[str, str]) -> Iterator[Column]:
    """Check each engine and yield its column: the embedded engine and, for each kind of server in ``pythons``, the fake
    and the real server. The values are Python interpreters in which the real server is installed; empty if there is
    none."""
    yield _check_engine("native", "native", native_rig)
    for kind, python in pythons.items():
        if python:
            # vLLM's older model runner, which runs on CPUs, returns neither
            can = replace(_on_cpu(kind), kept_sets=False, routing=False)
            yield _check_engine(kind, "real, on a processor", partial(_real, kind, python), can)
        if python and kind == "vllm":
            yield _check_engine(kind, "real, its kernels interpreted", partial(_interpreted, python), _on_cpu(kind))
        yield _check_engine(kind, "fake", partial(_fake, kind))


def _on_cpu(kind: str) -> Capabilities:
    """Return the capabilities that an engine of this kind has on a CPU."""
    return ENGINES.load(kind).capabilities.on(CPU)


OpenRig = Callable[[ServeRequirements, Path], AbstractContextManager[Rig]]
"""A function that opens a rig for some requirements, with a directory for weights."""


def _real(kind: str, python: str, required: ServeRequirements, scratch: Path) -> AbstractContextManager[Rig]:
    """Return a rig with a real server of ``kind``, started with the interpreter ``python``, that meets the requirements
    ``required``; ``scratch`` is a directory for its weights."""
    return served_rig(kind, ServerConfig(python=python, any_version=True, wait_s=900), required, scratch)


def _interpreted(python: str, required: ServeRequirements, scratch: Path) -> AbstractContextManager[Rig]:
    """Return a rig with a real vLLM whose Triton kernels run in Triton's interpreter on the CPU. The parameters are the
    same as in :func:`_real`."""
    return _real("vllm", write_interpreter(python, scratch), required, scratch)


@contextmanager
def _fake(kind: str, required: ServeRequirements, scratch: Path) -> Iterator[Rig]:
    """Yield a rig with a fake server of ``kind`` in this process that meets the requirements ``required``; ``scratch``
    is a directory for its weights."""
    with (
        fake_server(kind, required) as (url, _),
        served_rig(kind, ServerConfig(urls=(url,), any_version=True), required, scratch) as rig,
    ):
        yield rig


def _check_engine(kind: str, engine_type: str, make: OpenRig, can: Capabilities | None = None) -> Column:
    """Check one engine with all suites, and return its column of the table. ``make`` opens a rig with the engine,
    ``engine_type`` is the part of the heading that says whether the engine is real or a fake, and ``can`` are its
    capabilities; ``None``: the capabilities of engines of this ``kind``."""
    can, title, results = can or ENGINES.load(kind).capabilities, kind, list[str]()
    for suite in SUITES.values():
        if not suite.is_supported(can):
            results += [AT_LOAD] * len(suite.clauses)
            continue
        with _open_rig(suite, make, can) as rig:
            if isinstance(rig.core, ServedEngine):
                title = f"{rig.core.facts()['server']}, {engine_type}"
            results += [_check_clause(clause, rig) for clause in suite.clauses]
    return Column(title=title, capabilities=can, results=tuple(results))


@contextmanager
def _open_rig(suite: Suite, make: OpenRig, can: Capabilities) -> Iterator[Rig]:
    """Yield a rig for the clauses of ``suite``, which ``make`` opens with a tiny model of the suite in a temporary
    directory, for an engine with the capabilities ``can``."""
    with tempfile.TemporaryDirectory(prefix="headrace-contract-") as folder:
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        with make(suite.requirements(Path(folder) / "model", can), scratch) as rig:
            yield rig


def _check_clause(clause: Clause, rig: Rig) -> str:
    """Check a clause, and return its result for the table: ``yes`` if the engine meets it, ``refused`` or ``no`` if the
    engine lacks the capability, or :data:`BROKEN`; the reason is then printed to stderr."""
    try:
        return run_clause(clause, rig)
    except (AssertionError, HeadraceError) as error:
        print(f"{clause.name}: {error}", file=sys.stderr)  # noqa: T201 - a program
        return BROKEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
