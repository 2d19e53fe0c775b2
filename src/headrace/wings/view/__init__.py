"""The dashboard: what a run did and does, in a browser, from its directory and nothing else.

    metrics.jsonl ─┐ tails                         ┌─ pages in static/, plain ES modules
    trace.jsonl   ─┼────────▶ OpenRun ──answers──▶ │
    ledger.sqlite ─┘ pages       └── changes ────▶ └─ server-sent events

Nothing is written to the run directory, nothing is fetched from elsewhere, and whatever a model wrote is text: the
pages build their elements from text nodes, and their policy lets no script run but their own.

Importing this package imports nothing; :mod:`headrace.wings.view.serving` imports starlette.
"""
