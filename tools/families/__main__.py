"""Try every causal architecture of the installed transformers, and write docs/models.md.

    python -m tools.families [--only NAME ...] [--results FILE] [--again]

Each is made as a tiny random model in a process of its own and goes through ``headrace check model``. Results are kept
in a JSON file, so that an interrupted call goes on where it ended; ``--again`` forgets them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from pathlib import Path

from headrace.base.clock import RealClock
from tools.families.page import PAGE, Row, list_kinds, page, settings_refusal

LIMIT_S = 120
"""Longest time that one architecture may take, in seconds."""


def main() -> None:
    """Try what has no result yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=Path("/tmp/headrace-families.json"))
    parser.add_argument("--most-s", type=float, default=3600.0, help="stop after this many seconds")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    known = {} if options.again or not options.results.exists() else json.loads(options.results.read_text())
    import headrace.policy.model_check  # noqa: F401 - imported once, before the processes are forked

    wanted = options.only or [kind for kind in list_kinds() if kind not in known]
    clock = RealClock()
    began_s = clock.now()
    for kind in wanted:
        known[kind] = refusal_row(kind) or try_in_process(kind)
        options.results.write_text(json.dumps(known, indent=1))
        print(kind, *known[kind].values(), flush=True)
        if clock.now() - began_s > options.most_s:
            break
    PAGE.write_text(page({kind: Row(**row) for kind, row in known.items()}), encoding="utf-8")


def refusal_row(kind: str) -> dict[str, str]:
    """Return the row of the architecture ``kind`` if its default settings are refused; else an empty row."""
    with tempfile.TemporaryDirectory() as directory:
        reason = settings_refusal(kind, Path(directory))
    return {"verdict": "refused", "reason": reason} if reason else {}


def try_in_process(kind: str) -> dict[str, str]:
    """Return the row of ``kind``, made in a process of its own, which is ended after :data:`LIMIT_S`."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(kind, send))
    process.start()
    try:
        if not receive.poll(LIMIT_S):
            return {"verdict": "not tried", "reason": f"the check took longer than {LIMIT_S} s"}
        answer: dict[str, str] = receive.recv()
        return answer
    except EOFError:
        return {"verdict": "not tried", "reason": "the process of the check ended"}
    finally:
        process.kill()
        process.join()


def _try(kind: str, send: multiprocessing.connection.Connection) -> None:
    from tools.families.page import make_row

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        send.send(make_row(kind, Path(directory) / kind))


if __name__ == "__main__":
    main()
