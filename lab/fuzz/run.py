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
    """Try ``runs`` inputs, which ``seed`` determines; with ``quick`` only a few. ``on_progress`` is called with lines
    of progress."""
    total, rows, problems = runs or (FEW if quick else INPUTS), list[Row](), list[str]()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as directory, run_hosts(Path(directory)) as served:
        all_formats: list[Format | LiveFormat] = [*byte_formats(Path(directory)), *live_formats(served)]
        shares = sum(input_format.share for input_format in all_formats)
        for input_format in all_formats:
            clock, count = RealClock(), math.ceil(total * input_format.share / shares)
            start_s = clock.now()
            counts = _try_format(input_format, count, f"{seed}/{input_format.name}")
            rows.append(_row(input_format.name, counts, clock.now() - start_s))
            problems += counts.problems
            on_progress(f"{input_format.name}: {count:,} in {rows[-1]['seconds']:.0f} s")
        crashed = [words for host in served.values() if (words := host.problem())]
    for words in [*problems, *crashed]:
        on_progress(words)
    targets = [
        at_least("inputs", sum(row["inputs"] for row in rows), total, "inputs"),
        at_most("crashes", sum(row["crashes"] for row in rows) + len(crashed), 0, "inputs"),
        at_most("forgeries taken", sum(row["forged"] for row in rows), 0, "inputs"),
    ]
    return make_report(rows, targets)


def _try_format(input_format: Format | LiveFormat, count: int, seed: str) -> InputCounts:
    if isinstance(input_format, Format):
        return _read_all(input_format, count, seed)
    return asyncio.run(send_all(input_format, count, seed))


def _read_all(input_format: Format, count: int, seed: str) -> InputCounts:
    """Read ``count`` inputs of a format, which ``seed`` determines, and count the results."""
    rng, counts = random.Random(seed), InputCounts()
    for _ in range(count):
        data = input_format.change(rng, rng.choice(input_format.seeds), input_format.seeds)
        counts.inputs += 1
        try:
            is_accepted = input_format.read(data)
        except ForgedInput as error:
            counts.forged += 1
            counts.add_problem(f"{input_format.name}: {error}", data)
        except Exception as error:  # noqa: BLE001 - any unexpected error is a crash
            counts.crashes += 1
            counts.add_problem(f"{input_format.name}: {type(error).__name__}: {error}", data)
        else:
            counts.accepted += is_accepted
            counts.refused += not is_accepted
    return counts


def _row(name: str, counts: InputCounts, seconds: float) -> Row:
    kinds = ("inputs", "accepted", "refused", "crashes", "forged")
    return {"what": name, **{kind: getattr(counts, kind) for kind in kinds}, "seconds": seconds}
