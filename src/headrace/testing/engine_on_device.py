"""The contract suite of engines for the embedded engine on one device:
``python -m headrace.testing.engine_on_device DEVICE SECONDS [--few]``.

It prints one JSON object for each clause, as soon as it is checked, with the suite, the clause, what came of it, and
the seconds. It ends early, without an error, where SECONDS have passed. ``--few`` leaves out the clauses that need many
steps."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.errors import HeadraceError
from headrace.engine.embedded import NATIVE
from headrace.testing.engine_contract import SUITES, Clause, run_clause
from headrace.testing.engine_rig import Rig, native_rig

SHORT = "model"
"""The suite whose clauses need few steps, apart from commits."""
LONG = ("commits with `", "keeps a sequence under its weights")
"""The beginnings of the names of those clauses of it that need many."""
BROKEN = "BROKEN: "
"""The beginning of the result of a clause that the engine breaks."""


def check(device: str, *, few: bool) -> Iterator[dict[str, object]]:
    """Check the clauses of all suites on ``device``, and yield the result of each."""
    for name, suite in SUITES.items():
        if few and name != SHORT:
            continue
        clauses = [clause for clause in suite.clauses if not (few and clause.name.startswith(LONG))]
        with tempfile.TemporaryDirectory(prefix="headrace-contract-") as scratch:
            required = suite.requirements(Path(scratch) / "model", NATIVE.capabilities)
            with native_rig(required, Path(scratch), device) as rig:
                yield from ({"suite": name, **_result(clause, rig)} for clause in clauses)


def _result(clause: Clause, rig: Rig) -> dict[str, object]:
    """Return what came of a clause: its name, the result of :func:`~headrace.testing.engine_contract.run_clause` or
    :data:`BROKEN` with the error, and the seconds."""
    clock = RealClock()
    start_s = clock.now()
    try:
        result = run_clause(clause, rig)
    except (AssertionError, HeadraceError, RuntimeError) as error:  # the last: what torch raises on a device
        result = f"{BROKEN}{type(error).__name__}: {error}"[:400]
    return {"clause": clause.name, "result": result, "s": clock.now() - start_s}


def main(arguments: list[str]) -> None:
    """Run the program with its command-line ``arguments``."""
    device, seconds, *options = arguments
    clock = RealClock()
    end_s = clock.now() + float(seconds)
    for found in check(device, few="--few" in options):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        if clock.now() > end_s:
            break


if __name__ == "__main__":
    main(sys.argv[1:])
