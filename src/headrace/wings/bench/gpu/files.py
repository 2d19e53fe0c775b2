"""The file of ``headrace bench gpu``: one JSON object, which is written anew after each stage, compared with that of
another day, and read by ``headrace plan --calibrate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.base.errors import DataError
from headrace.wings.bench.base import Row
from headrace.wings.bench.gpu.base import GpuStageOutcome
from headrace.wings.plan.card import FORMAT, CardRates

SLOWER = 0.95
"""A figure of less than this share of the former one is reported as slower."""
_LESS_IS_BETTER = ("overhead_s", "gap_s")
_RATES = tuple(name for name in CardRates.__struct_fields__ if name != "card")
"""The figures that the planner reads."""


class GpuFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    format: int = FORMAT
    """Number of the format."""
    made: str
    """Time of the beginning, for people to read."""
    pretend: bool
    """Whether the device only claimed to be a GPU, so that no figure means anything."""
    card: str
    """Name of the GPU; ``claimed`` for one that only claims to be one."""
    budget_s: float
    rates: CardRates
    """What ``headrace plan --calibrate`` reads; a rate is ``None`` until it has been measured."""
    stages: list[GpuStageOutcome]


def rates_of(card: str, outcomes: Sequence[GpuStageOutcome]) -> CardRates:
    """Return what the planner needs, as far as the stages so far have measured it."""
    figures = figures_of(outcomes)
    return CardRates(card=card, **{name: figures.get(name) for name in _RATES})


def figures_of(outcomes: Sequence[GpuStageOutcome]) -> dict[str, float]:
    """Return the figures of all stages by name."""
    return {key: value for outcome in outcomes for key, value in outcome.figures.items()}


def write_file(path: Path, content: GpuFile) -> None:
    """Write the file anew, so that at each moment it is whole: the former one, or this one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    partial.replace(path)


def read_file(path: Path) -> GpuFile:
    """Return the content of the file ``path``. Raises :class:`~headrace.base.errors.DataError` if it is none."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=GpuFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(
            f"{path} is no file of headrace bench gpu: {error}", remedy="name a file that --out has written"
        ) from None
    if found.format != FORMAT:
        raise DataError(
            f"{path} has format {found.format}, and {FORMAT} is read", remedy="measure again with this version"
        )
    return found


def compared(now: Mapping[str, float], before: Mapping[str, float]) -> list[Row]:
    """Return a row for each figure that both have, with their ratio and whether the new one is slower."""
    rows: list[Row] = []
    for name in sorted(now.keys() & before.keys()):
        if not before[name] or not now[name]:
            continue
        ratio = now[name] / before[name]
        gain = 1 / ratio if name in _LESS_IS_BETTER else ratio
        verdict = "slower" if gain < SLOWER else "faster" if gain > 1 / SLOWER else "same"
        rows.append(
            {"what": f"compared, {name}", "now": now[name], "before": before[name], "ratio": ratio, "is": verdict}
        )
    return rows
