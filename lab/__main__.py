"""The command ``python -m lab EXPERIMENT``, which prints the figures and exits with 1 if one misses its target."""

import argparse
import sys
from collections.abc import Callable

import msgspec

from headrace.wings.bench.base import Report, format_report
from lab.faults import run as faults
from lab.fuzz import run as fuzz
from lab.paired import run as paired

EXPERIMENTS: dict[str, Callable[..., Report]] = {"fuzz": fuzz.measure, "faults": faults.measure}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab", description="Try Headrace as no user would.")
    kinds = parser.add_subparsers(dest="experiment", required=True)
    for name in EXPERIMENTS:
        kind = kinds.add_parser(name)
        kind.add_argument("--runs", type=int, help="fuzz: how many inputs; faults: how many runs")
        kind.add_argument("--seed", type=int, default=0, help="seed of the first one")
    kinds.choices["faults"].add_argument(
        "--rollouts", type=int, default=0, help="how many rollout shards the runs have"
    )
    kind = kinds.add_parser("paired")
    kind.add_argument("--python", required=True, help="interpreter in whose environment the other version is installed")
    kind.add_argument("--package", default="headrace.wings.bench", help="package of its benchmarks")
    kind.add_argument("--rounds", type=int, default=5, help="how often each figure is measured")
    kind.add_argument("--seconds", type=float, default=3600.0, help="no round of a benchmark begins after this time")
    kind.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help="engine, learner, sync or loop; unset: all")
    for kind in kinds.choices.values():
        kind.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run the experiment that the command line names, and exit with 1 if a figure misses its target."""
    options = _options()
    if options.experiment == "paired":
        unknown = set(options.benchmarks) - set(paired.BENCHMARKS)
        if unknown:
            sys.exit(f"unknown benchmark {sorted(unknown)[0]!r}; there are {', '.join(paired.BENCHMARKS)}")
        report = paired.measure(
            _tell, python=options.python, package=options.package, rounds=options.rounds, seconds=options.seconds,
            benchmarks=tuple(options.benchmarks) or paired.BENCHMARKS,
        )  # fmt: skip
    else:
        arguments = {"seed": options.seed} | ({"runs": options.runs} if options.runs else {})
        if options.experiment == "faults":
            arguments["rollouts"] = options.rollouts
        report = EXPERIMENTS[options.experiment](_tell, **arguments)
    print(msgspec.json.encode(report).decode() if options.json else format_report(report))
    sys.exit(not all(target.holds for target in report.targets))


if __name__ == "__main__":
    main()
