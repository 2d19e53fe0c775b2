"""The report of a benchmark: *rows* of measurements, and *targets*, which are measured figures with limits. Every
benchmark of this package returns a :class:`Report`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import msgspec
import psutil

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores

Row = dict[str, Any]
"""One measurement: values by column; each benchmark has its own columns."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A measured figure with its limit; the command ``headrace bench`` fails if a figure is beyond its limit."""

    name: str
    """The name of the figure, in words."""
    value: float
    """The measured value in ``unit``."""
    unit: str
    """The unit of value and limit: ``s``, ``ms``, ``fraction``, ``ratio``."""
    target: str
    """The comparison with the limit: ``<= 0.75`` or ``>= 0.9``."""
    holds: bool
    """Whether the value is within the limit."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of a benchmark, which is printed as text or as JSON."""

    machine: dict[str, Any]
    """Facts about the machine, such as ``cores`` and ``memory_gb`` (GiB)."""
    versions: dict[str, str]
    """The version of Python and of each main package, by name."""
    rows: list[Row]
    targets: list[Target]


Measurement = tuple[list[Row], list[Target]]
"""The rows and the targets of one measurement."""


def at_most(name: str, value: float, limit: float, unit: str) -> Target:
    """Return a target with an upper limit: ``value`` should be ``limit`` or less, both in ``unit``. ``name`` is the
    name of the target in the report.

    >>> at_most("gap", 0.4, 5.0, "ms").holds
    True
    """
    return Target(name=name, value=value, unit=unit, target=f"<= {limit:g}", holds=value <= limit)


def at_least(name: str, value: float, limit: float, unit: str) -> Target:
    """Return a target with a lower limit: ``value`` should be ``limit`` or more, both in ``unit``. ``name`` is the name
    of the target in the report."""
    return Target(name=name, value=value, unit=unit, target=f">= {limit:g}", holds=value >= limit)


def make_report(rows: list[Row], targets: list[Target]) -> Report:
    """Return a report of ``rows`` and ``targets``, with a description of this machine and the versions of the main
    packages added."""
    machine = {
        "cores": num_cores(),
        "processor": platform.processor() or platform.machine(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
    }
    packages = ("headrace", "torch", "transformers", "numpy")
    versions = {"python": platform.python_version(), **{package: version(package) for package in packages}}
    return Report(machine=machine, versions=versions, rows=rows, targets=targets)


def join_report(parts: Iterable[Measurement]) -> Report:
    """Return the report of all rows and all targets of several measurements, with the facts of this machine."""
    measurements = list(parts)
    rows = [row for each, _ in measurements for row in each]
    return make_report(rows, [target for _, each in measurements for target in each])


def measure_s(act: Callable[[], object]) -> float:
    """Return the duration of one call of ``act``, in seconds."""
    clock = RealClock()
    start_s = clock.now()
    act()
    return clock.now() - start_s


def shortest_s(act: Callable[[], object], times: int) -> float:
    """Call ``act`` as many ``times``, and return the duration of the shortest call, in seconds."""
    return min(measure_s(act) for _ in range(times))


def get_columns(record: object, *names: str) -> Row:
    """Return the attributes ``names`` of ``record`` as columns of a row."""
    return {name: getattr(record, name) for name in names}


def format_report(report: Report) -> str:
    """Return a report as text: the machine, the versions, a line for each row, and a line for each target with its
    value, its limit, and ``holds`` or ``FALLS SHORT``."""
    lines = [", ".join(f"{key} {value}" for key, value in report.machine.items())]
    lines += [", ".join(f"{key} {value}" for key, value in report.versions.items()), ""]
    lines += ["  ".join(f"{key}={_short(value)}" for key, value in row.items()) for row in report.rows]
    lines.append("")
    width = max((len(target.name) for target in report.targets), default=0)
    for target in report.targets:
        verdict = "holds" if target.holds else "FALLS SHORT"
        lines.append(
            f"{target.name:<{width}}  {_short(target.value):>10} {target.unit:<9} {target.target:<10} {verdict}"
        )
    return "\n".join(lines)


def _short(value: object) -> str:
    """Return a value as text; a float with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
