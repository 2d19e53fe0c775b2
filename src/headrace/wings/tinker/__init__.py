"""The Tinker protocol: its unmodified client trains and samples on this machine.

    client ──HTTP──▶ app ──▶ service ──▶ journal (every accepted request of a model, before it is acknowledged)
                                │
             ┌──────────────────┴───────────────────┐
             ▼                                      ▼
    tenants: requests in seq_id order      samplers: fixed or in-flight weights
             │  turns: one micro-batch             │  one engine, rows of several
             ▼  of each tenant in turn             ▼  adapters in one pass
    compute: one frozen base, an adapter for each tenant ◀── memory shared ──▶ the engine's model

docs/tinker.md says what is served and how; docs/design has the reasons.
"""
