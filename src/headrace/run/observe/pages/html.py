"""Functions that all pages of an evaluation use: escaped text, figures, and the frame of an HTML page."""

from __future__ import annotations

import html
import math

from headrace.base.errors import visible
from headrace.run.observe.words import number

MAX_CHARACTERS = 200_000
"""The maximum number of characters of one text that are shown."""


def text(value: object, limit: int = MAX_CHARACTERS) -> str:
    """Return ``value`` as escaped text for an HTML page, cut after ``limit`` characters. Line breaks are kept; other
    control characters are replaced by visible escape sequences.

    >>> text("<b>\\x1b[31m\\n")
    '&lt;b&gt;\\\\x1b[31m\\n'
    """
    full_text = str(value)
    visible_text = "\n".join(visible(line, limit) for line in full_text[:limit].split("\n"))
    return html.escape(visible_text + ("…" if len(full_text) > limit else ""), quote=True)


def figure(value: float | None) -> str:
    """Return a number as text with about three digits for a page; a dash for ``None``, and ``nan`` or ``inf`` for a
    number that is not finite."""
    if value is not None and not math.isfinite(value):
        return str(value)
    sign = "−" if value is not None and value < 0 else ""
    return sign + number(None if value is None else abs(value))


def page(title: str, body: str) -> str:
    """Return a whole HTML document with the plain text ``title`` and with ``body``, which is HTML and must be escaped
    already. The document cannot run a script or load other files.

    >>> page("a run", "<h1>a run</h1>").count("<h1>")
    1
    """
    return _SHELL.format(title=text(title), style=_STYLE, body=body)


_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { --paper: #f4f6f8; --card: #ffffff; --ink: #1b2330; --faint: #5b6675; --line: #dfe4ea; --mark: #0072B2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0f1319; --card: #171c24; --ink: #e8ecf1; --faint: #9aa7b6; --line: #2b3440; --mark: #4ba3e3; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
.brand { margin: 0; color: var(--mark); font-weight: 700; letter-spacing: .04em; }
.wide { overflow-x: auto; }
dd { margin: 0; font-weight: 650; font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--faint); font-size: 13px; font-weight: 400; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 15px; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; }
:focus-visible { outline: 3px solid var(--mark); outline-offset: 2px; }
:root { --good: #0f7b4f; --bad: #b3261e; --t1: #d9ecd9; --t2: #f6edc4; --t3: #f8d9b8; --t4: #f4bdb6; }
@media (prefers-color-scheme: dark) { :root { --good: #52c594; --bad: #f2877f; --t1: #1d3a2a; --t2: #45401c;
  --t3: #523619; --t4: #5c2723; } }
h1 { margin: 0 0 12px; font-size: 26px; overflow-wrap: anywhere; }
h2 { margin: 0 0 8px; font-size: 17px; overflow-wrap: anywhere; }
a { color: var(--mark); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 0 0 20px; }
.cards div, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
section { margin: 0 0 16px; }
dt, .faint, figcaption { color: var(--faint); font-size: 14px; }
dd { font-size: 21px; overflow-wrap: anywhere; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.6 ui-monospace, "DejaVu Sans Mono",
  monospace; }
.l1 { background: var(--t1); } .l2 { background: var(--t2); } .l3 { background: var(--t3); }
.l4 { background: var(--t4); } .lx { outline: 1px solid var(--bad); }
.good { color: var(--good); } .bad { color: var(--bad); }
th, td { vertical-align: top; }
th { color: var(--faint); font-weight: 600; }
th:first-child, td:first-child, .left { text-align: left; overflow-wrap: anywhere; }
svg text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }
svg path { fill: none; stroke: var(--faint); stroke-width: 1.5; }
svg .sampled { fill: var(--mark); } svg .given { fill: var(--faint); }
:target { outline: 3px solid var(--mark); outline-offset: 2px; }
"""
