"""What all pages have in common."""

from __future__ import annotations

import html
import math

from headrace.base.errors import visible
from headrace.run.observe.document import document
from headrace.run.observe.words import number

LONGEST = 200_000
"""Characters of one text that are shown."""


def text(value: object, limit: int = LONGEST) -> str:
    """Any text as part of a page: its lines stay lines, every other character that could steer a browser or a terminal
    is spelled out.

    >>> text("<b>\\x1b[31m\\n")
    '&lt;b&gt;\\\\x1b[31m\\n'
    """
    whole = str(value)
    shown = "\n".join(visible(line, limit) for line in whole[:limit].split("\n"))
    return html.escape(shown + ("…" if len(whole) > limit else ""), quote=True)


def figure(value: float | None) -> str:
    """A number in few digits; a dash for none, and for what is no finite number its name."""
    if value is not None and not math.isfinite(value):
        return str(value)
    sign = "−" if value is not None and value < 0 else ""
    return sign + number(None if value is None else abs(value))


def page(title: str, body: str) -> str:
    """A whole document."""
    return document(text(title), body, _STYLE)


_STYLE = """
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
