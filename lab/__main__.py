"""The command ``python -m lab EXPERIMENT``, which prints the figures and exits with 1 if one misses its target."""

import argparse
import sys
from collections.abc import Callable

import msgspec

from headrace.wings.bench.base import Report, show
from lab.faults import run as faults
from lab.fuzz import run as fuzz

EXPERIMENTS: dict[str, Callable[..., Report]] = {"fuzz": fuzz.measure, "faults": faults.measure}

parser = argparse.ArgumentParser(prog="python -m lab", description="Try Headrace as no user would.")
parser.add_argument("experiment", choices=EXPERIMENTS)
parser.add_argument("--runs", type=int, help="fuzz: how many inputs; faults: how many runs")
parser.add_argument("--seed", type=int, default=0, help="of the first one")
parser.add_argument("--json", action="store_true", help="print one JSON object")
arguments = parser.parse_args()
options = {"seed": arguments.seed} | ({"runs": arguments.runs} if arguments.runs else {})
report = EXPERIMENTS[arguments.experiment](lambda line: print(line, file=sys.stderr), **options)
print(msgspec.json.encode(report).decode() if arguments.json else show(report))
sys.exit(not all(target.holds for target in report.targets))
