"""Charts as SVG text, for the pictures that commands such as ``headrace plan`` write: bars and points in panels with
axes.

Coordinates are in pixels from the upper left corner; y grows downwards. The dashboard draws its own charts in the
browser. The colours come from the palette of Okabe and Ito, which colour-blind people can distinguish.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from headrace.base.errors import visible

INK, FAINT, GRID = "#1b2330", "#5b6675", "#e3e7ec"
"""The colours of titles, of other text, and of grid lines."""
BLUE, ORANGE, GREEN, PURPLE, SKY, SLATE = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#a9b4c0"
"""The colours of bars and points."""


class Drawing:
    """A picture of ``width`` by ``height`` pixels. Each method adds a shape, and :meth:`svg` returns the whole as the
    content of an SVG file.

    >>> drawing = Drawing(100, 50, "an example")
    >>> drawing.text(10, 20, "a < b")
    >>> drawing.svg().count(b"a &lt; b")
    1
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        """Start an empty picture of ``width`` by ``height`` pixels with a white background. ``label`` is its
        description for screen readers."""
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="{_text(label)}" '
            'font-family="system-ui, DejaVu Sans, sans-serif">'
            f'<rect width="100%" height="100%" fill="#ffffff"/>'
        )
        self._parts: list[str] = []
        """The shapes so far, as elements of SVG."""

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, color: str = FAINT
    ) -> None:
        """Write ``words`` with their baseline at ``y``. ``anchor`` says which point of the text is at ``x``: ``start``,
        ``middle`` or ``end``; ``size`` is the size of the font in pixels. Large text in the colour ``INK`` is bold."""
        weight = ' font-weight="600"' if color == INK and size > 12 else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}"{weight}>'
            f"{_text(words)}</text>"
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw a thin line of the grid, in a light grey, from ``x``, ``y`` to ``to_x``, ``to_y``."""
        self._parts.append(f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{GRID}"/>')

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draw a filled rectangle whose upper left corner is at ``x``, ``y``, such as the bar of a chart. A negative
        width is drawn as 0."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{color}"/>'
        )

    def dot(self, x: float, y: float, color: str) -> None:
        """Draw a filled circle, 4 pixels in radius, with its centre at ``x`` and ``y``: one point of a chart."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.85"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Write a legend in one row from ``x`` to the right, with its baseline at ``y``. Each entry consists of its
        words and the colour of the square before the words."""
        for words, color in entries:
            self.bar(x, y - 9, 10, 10, color)
            self.text(x + 15, y, words, size=11)
            x += 30 + 6.5 * len(words)

    def svg(self) -> bytes:
        """Return the whole picture as the content of an SVG file, in UTF-8."""
        return "\n".join([self._head, *self._parts, "</svg>\n"]).encode()


class Panel:
    """A rectangle of a drawing with a horizontal and a vertical axis, which both start at 0. Its methods convert values
    to pixels of the drawing; the caller draws the bars and points."""

    def __init__(self, drawing: Drawing, box: tuple[float, float, float, float], maxima: tuple[float, float]) -> None:
        """Draw the grid lines and numbers of both axes on ``drawing``. ``box`` is the left edge, top edge, width and
        height in pixels; ``maxima`` are the largest values of the horizontal and of the vertical axis, and 0 draws no
        axis."""
        self.left, self.top, self.width, self.height = box
        self._maxima = maxima
        for value in ticks(maxima[0]):
            drawing.line(self.x(value), self.top, self.x(value), self.top + self.height)
            drawing.text(self.x(value), self.top + self.height + 15, f"{value:,g}", anchor="middle", size=11)
        for value in ticks(maxima[1]):
            drawing.line(self.left, self.y(value), self.left + self.width, self.y(value))
            drawing.text(self.left - 6, self.y(value) + 4, f"{value:,g}", anchor="end", size=11)

    def x(self, value: float) -> float:
        """Return the horizontal position of a value of the horizontal axis, in pixels of the drawing."""
        return self.left + value / (self._maxima[0] or 1.0) * self.width

    def y(self, value: float) -> float:
        """Return the vertical position of a value of the vertical axis, in pixels of the drawing; larger values are
        higher up."""
        return self.top + self.height * (1 - value / (self._maxima[1] or 1.0))


def ticks(maximum: float) -> list[float]:
    """Return the values at which an axis from 0 to ``maximum`` has its grid lines: multiples of 1, 2 or 5 times a power
    of ten, at most six of them; none if ``maximum`` is not above 0.

    >>> ticks(100), ticks(0.37), ticks(0)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.0, 0.1, 0.2, 0.3], [])
    """
    if not maximum > 0:
        return []
    power = 10.0 ** math.floor(math.log10(maximum / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= maximum / 5)
    return [round(index * step, 10) for index in range(int(maximum / step + 1e-9) + 1)]


def _text(words: str) -> str:
    """Return ``words`` as text for SVG: escaped, on one line, with control characters made visible, and at most 200
    characters long."""
    return html.escape(visible(words, 200), quote=True)
