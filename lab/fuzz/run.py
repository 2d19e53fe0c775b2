"""The fuzz experiment: with modified inputs of every wire format and endpoint, nothing crashes and no forgery is
accepted.

    valid input ──flip, cut, splice, inflate, nest, replace──▶ a reader of the library   ──▶ accepted, refused,
                                                               or a server, over TCP         crashed, or forged

The seed determines the inputs. ``runs`` is their total number, divided among the formats.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from headrace.base.clock import RealClock
from headrace.wings.bench.base import Report, Row, at_least, at_most, make_report
from lab.fuzz.formats import Format, byte_formats
from lab.fuzz.live import InputCounts, LiveFormat, live_formats, run_hosts, send_all
from lab.fuzz.weights import ForgedInput

INPUTS, FEW = 1_000_000, 4_000


def measure(on_progress: Callable[[str], None], quick: bool = False, runs: int = 0, seed: int = 0) -> Report:
    """Try ``runs`` inputs; with ``quick`` only a few."""
    total, rows, first = runs or (FEW if quick else INPUTS), list[Row](), list[str]()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as directory, run_hosts(Path(directory)) as served:
        all_formats: list[Format | LiveFormat] = [*byte_formats(Path(directory)), *live_formats(served)]
        shares = sum(what.share for what in all_formats)
        for what in all_formats:
            clock, count = RealClock(), math.ceil(total * what.share / shares)
            start_s = clock.now()
            counted = _counted(what, count, f"{seed}/{what.name}")
            rows.append(_row(what.name, counted, clock.now() - start_s))
            first += counted.problems
            on_progress(f"{what.name}: {count:,} in {rows[-1]['seconds']:.0f} s")
        crashed = [words for host in served.values() if (words := host.problem())]
    for words in [*first, *crashed]:
        on_progress(words)
    targets = [
        at_least("inputs", sum(row["inputs"] for row in rows), total, "inputs"),
        at_most("crashes", sum(row["crashes"] for row in rows) + len(crashed), 0, "inputs"),
        at_most("forgeries taken", sum(row["forged"] for row in rows), 0, "inputs"),
    ]
    return make_report(rows, targets)


def _counted(what: Format | LiveFormat, count: int, seed: str) -> InputCounts:
    if isinstance(what, Format):
        return _read_all(what, count, seed)
    return asyncio.run(send_all(what, count, seed))


def _read_all(what: Format, count: int, seed: str) -> InputCounts:
    rng, counted = random.Random(seed), InputCounts()
    for _ in range(count):
        data = what.change(rng, rng.choice(what.seeds), what.seeds)
        counted.inputs += 1
        try:
            taken = what.read(data)
        except ForgedInput as error:
            counted.forged += 1
            counted.add_problem(f"{what.name}: {error}", data)
        except Exception as error:  # noqa: BLE001 - any unexpected error is a crash
            counted.crashes += 1
            counted.add_problem(f"{what.name}: {type(error).__name__}: {error}", data)
        else:
            counted.accepted += taken
            counted.refused += not taken
    return counted


def _row(name: str, counted: InputCounts, seconds: float) -> Row:
    kinds = ("inputs", "accepted", "refused", "crashes", "forged")
    return {"what": name, **{kind: getattr(counted, kind) for kind in kinds}, "seconds": seconds}
