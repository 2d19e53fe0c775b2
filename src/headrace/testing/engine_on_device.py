"""The contract suite of engines for the embedded engine on one device:
``python -m headrace.testing.engine_on_device DEVICE SECONDS [--few]``.

It prints one JSON object for each clause as soon as the clause is checked, with the suite, the clause, the result and
the duration in seconds. It ends early, without an error, when SECONDS have passed. ``--few`` leaves out the clauses
that need many engine steps."""

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
"""The suite whose clauses, except those that begin with :data:`LONG`, need few engine steps."""
LONG = ("commits with `", "keeps a sequence under its weights")
"""The beginnings of the names of clauses that need many engine steps."""
BROKEN = "BROKEN: "
"""The beginning of the result for a clause that the engine breaks; the error follows it."""


def check(device: str, *, few: bool) -> Iterator[dict[str, object]]:
    """Check the clauses of all suites on ``device``, and yield one JSON object with the result of each clause. With
    ``few``, leave out the clauses that need many steps."""
    for name, suite in SUITES.items():
        if few and name != SHORT:
            continue
        clauses = [clause for clause in suite.clauses if not (few and clause.name.startswith(LONG))]
        with tempfile.TemporaryDirectory(prefix="headrace-contract-") as scratch:
            required = suite.requirements(Path(scratch) / "model", NATIVE.capabilities)
            with native_rig(required, Path(scratch), device) as rig:
                yield from ({"suite": name, **_check_clause(clause, rig)} for clause in clauses)


def _check_clause(clause: Clause, rig: Rig) -> dict[str, object]:
    """Check a clause and return its name, its result and the duration in seconds. The result is the result of
    :func:`~headrace.testing.engine_contract.run_clause`, or :data:`BROKEN` with the error."""
    clock = RealClock()
    start_s = clock.now()
    try:
        result = run_clause(clause, rig)
    except (AssertionError, HeadraceError, RuntimeError) as error:  # torch raises RuntimeError for errors of a device
        result = f"{BROKEN}{type(error).__name__}: {error}"[:400]
    return {"clause": clause.name, "result": result, "s": clock.now() - start_s}


def main(arguments: list[str]) -> None:
    """Run the program with its command-line ``arguments``."""
    device, seconds, *options = arguments
    clock = RealClock()
    end_s = clock.now() + float(seconds)
    for result in check(device, few="--few" in options):
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        if clock.now() > end_s:
            break


if __name__ == "__main__":
    main(sys.argv[1:])
