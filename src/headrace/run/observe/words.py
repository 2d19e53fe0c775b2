"""Functions that format numbers, durations, shares, bars and sparklines as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_BARS = "▁▂▃▄▅▆▇█"
"""The characters of a sparkline, from the lowest value to the highest."""


def number(value: float | None, digits: int = 3) -> str:
    """Return ``value`` as text with ``digits`` significant digits, or as a whole number if it has at least that many
    digits before the point; a dash for ``None``.

    >>> number(0.71349), number(12345.6), number(None)
    ('0.713', '12,346', '–')
    """
    if value is None:
        return "–"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def plural(amount: float | None, unit: str, units: str = "") -> str:
    """Return ``amount`` with its unit as text; a dash for ``None``. ``unit`` is the unit in the singular, and ``units``
    in the plural (by default ``unit`` with an ``s``).

    >>> plural(1, "version"), plural(0, "version"), plural(2, "entry", "entries"), plural(12345, "token")
    ('1 version', '0 versions', '2 entries', '12,345 tokens')
    """
    if amount is None:
        return "–"
    shown = f"{amount:,.0f}" if float(amount).is_integer() else number(amount)
    return f"{shown} {unit if amount == 1 else units or f'{unit}s'}"


def percent(share: float) -> str:
    """Return a share as a whole-number percentage. Halves are rounded up, as the dashboard does.

    >>> percent(0.125), percent(0.124)
    ('13%', '12%')
    """
    return f"{math.floor(100 * share + 0.5)}%"


def percents(shares: Sequence[float], total: int | None) -> list[int]:
    """Return ``shares``, fractions of a whole, as whole-number percentages. With ``total`` they are scaled and rounded
    so that they add up to exactly ``total`` percent: the shares with the largest remainders are rounded up. (If every
    share is 0, so are all percentages.) If ``total`` is ``None``, each share is rounded by itself, halves up.

    >>> percents([0.124, 0.124, 0.252], 50), percents([0.125], None)
    ([13, 12, 25], [13])
    """
    if total is None:
        return [math.floor(100 * share + 0.5) for share in shares]
    whole = sum(shares)
    exact = [share / whole * total if whole > 0 else 0.0 for share in shares]
    floors = [math.floor(each) for each in exact]
    left = total - sum(floors) if whole > 0 else 0
    rounded_up = sorted(range(len(exact)), key=lambda index: floors[index] - exact[index])[:left]
    return [floor + (index in rounded_up) for index, floor in enumerate(floors)]


def duration(seconds: float | None) -> str:
    """Return a time in the unit that people would use; a dash for ``None``.

    >>> duration(0), duration(0.00012), duration(0.0312), duration(0.42), duration(72), duration(7384), duration(None)
    ('0 s', '120 µs', '31.2 ms', '0.42 s', '1 min 12 s', '2 h 03 min', '–')
    """
    if seconds is None:
        return "–"
    if not seconds:
        return "0 s"
    if abs(seconds) < 0.0995:
        return f"{number(seconds * 1e3)} ms" if abs(seconds) >= 1e-3 else f"{number(seconds * 1e6)} µs"
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return ``values`` as a chart in one line of at most ``width`` characters: each is a vertical bar for the mean of
    one or more neighbouring values, between the smallest mean and the largest. A bar whose values are all ``None`` is a
    blank.

    >>> sparkline([0, 1, 2, 3], 4), sparkline([0, 0, 3, 3], 2)
    ('▁▃▆█', '▁█')
    """
    if not values or width < 1:
        return ""
    bins = min(width, len(values))
    means = [_mean(values[len(values) * i // bins : len(values) * (i + 1) // bins]) for i in range(bins)]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * bins
    low, span = min(known), max(known) - min(known)
    return "".join(" " if mean is None else _BARS[round((mean - low) / span * 7) if span else 3] for mean in means)


def bar(frac: float, width: int) -> str:
    """Return a horizontal bar of ``width`` characters, of which the fraction ``frac`` is filled; a fraction below 0 or
    above 1 counts as 0 or 1.

    >>> bar(0.5, 4)
    '██░░'
    """
    full = round(min(max(frac, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def ages_in_words(ages: Mapping[int, int]) -> str:
    """Return a histogram of token ages as text. ``ages`` has the number of tokens by age in versions; the text has the
    share of each age. A dash stands for an empty histogram.

    >>> ages_in_words({0: 30, 1: 10})
    '0: 75%, 1: 25%'
    """
    total = sum(ages.values())
    return ", ".join(f"{age}: {tokens / total:.0%}" for age, tokens in sorted(ages.items())) if total else "–"


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not ``None``; ``None`` if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
