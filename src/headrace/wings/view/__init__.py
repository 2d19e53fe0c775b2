"""The dashboard: it shows running and finished runs in a browser, and reads only their run directories.

    metrics.jsonl ─┐ tails                         ┌─ pages in static/, plain ES modules
    trace.jsonl   ─┼────────▶ OpenRun ──answers──▶ │
    ledger.sqlite ─┘ pages       └── changes ────▶ └─ server-sent events

The dashboard writes nothing to the run directory and loads nothing from other hosts. Text of a model is shown as plain
text: the pages build their elements from text nodes, and their Content-Security-Policy allows only their own scripts.

Importing this package imports nothing; :mod:`headrace.wings.view.serving` imports starlette.
"""
