"""What every page that is written to a file has in common: the document around it, and how it looks, light and dark."""

from __future__ import annotations


def document(title: str, body: str, style: str, *, pictures: bool = False) -> str:
    """A whole document, in which nothing can run and which asks nobody for anything. ``title`` and ``body`` are HTML;
    ``style`` is what this kind of page adds to the common one, and ``pictures`` allows those that stand in it.

    >>> document("a run", "<h1>a run</h1>", "h1 { margin: 0; }").count("<h1>")
    1
    """
    allowed = "img-src data:; " if pictures else ""
    return _SHELL.format(title=title, style=_STYLE + style, body=body, allowed=allowed)


_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {allowed}style-src 'unsafe-inline'">
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
"""
