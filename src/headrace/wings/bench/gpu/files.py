"""The file of ``headrace bench gpu``: one JSON object, which is replaced after each stage, can be compared with the
file of another measurement, and is read by ``headrace plan --calibrate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.base.errors import DataError
from headrace.wings.bench.base import Row
from headrace.wings.bench.gpu.base import GpuStageOutcome
from headrace.wings.plan.card import FORMAT, CardRates

SLOWER = 0.95
"""The ratio of a figure to its former value below which the figure is reported as slower."""
_LESS_IS_BETTER = ("overhead_s", "gap_s")
"""The figures of which a smaller value is better."""
_RATES = tuple(name for name in CardRates.__struct_fields__ if name != "card")
"""The names of the figures that the planner reads."""


class GpuFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file of one measurement."""

    format: int = FORMAT
    """The number of the file's format."""
    made: str
    """The date and time of the start, as text."""
    pretend: bool
    """True if the device only claimed to be a GPU: figures mean nothing."""
    card: str
    """The name of the GPU; ``claimed`` for the claimed device."""
    budget_s: float
    rates: CardRates
    """The rates that ``headrace plan --calibrate`` reads; a rate is ``None`` until it has been measured."""
    stages: list[GpuStageOutcome]


def make_card_rates(card: str, outcomes: Sequence[GpuStageOutcome]) -> CardRates:
    """Return the rates of the GPU ``card`` in ``outcomes`` for the planner; a rate that no stage has measured yet is
    ``None``."""
    figures = merge_figures(outcomes)
    return CardRates(card=card, **{name: figures.get(name) for name in _RATES})


def merge_figures(outcomes: Sequence[GpuStageOutcome]) -> dict[str, float]:
    """Return the figures of all stages, whose ``outcomes`` are given, by name."""
    return {key: value for outcome in outcomes for key, value in outcome.figures.items()}


def write_file(path: Path, content: GpuFile) -> None:
    """Replace the file ``path`` atomically: a reader finds the whole former or the whole new content."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    partial.replace(path)


def read_file(path: Path) -> GpuFile:
    """Return the content of the file ``path``. Raises :class:`~headrace.base.errors.DataError` if it cannot be read, or
    is not a file of ``headrace bench gpu`` in this format."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=GpuFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(
            f"{path} is no file of headrace bench gpu: {error}", remedy="name a file that --out has written"
        ) from None
    if content.format != FORMAT:
        raise DataError(
            f"{path} has format {content.format}, and {FORMAT} is read", remedy="measure again with this version"
        )
    return content


def compare_figures(now: Mapping[str, float], before: Mapping[str, float]) -> list[Row]:
    """Return a row for each figure that is in both ``now`` and ``before``, with their ratio and whether the new figure
    is slower."""
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
