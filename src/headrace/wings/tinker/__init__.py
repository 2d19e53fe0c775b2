"""The server of the Tinker protocol, with which the protocol's unmodified client trains and samples on this machine.

    client ──HTTP──▶ app ──▶ service ──▶ journal (every accepted request of a model, before it is acknowledged)
                                │
             ┌──────────────────┴───────────────────┐
             ▼                                      ▼
    tenants: requests in seq_id order      samplers: fixed or in-flight weights
             │  turns: one micro-batch             │  one engine, rows of several
             ▼  of each tenant in turn             ▼  adapters in one pass
    compute: one frozen base, an adapter for each tenant ◀── memory shared ──▶ the engine's model

docs/tinker.md describes the supported parts of the protocol; docs/design has the reasons of the design.
"""
