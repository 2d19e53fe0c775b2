"""The ledger: the durable record of every group, episode and token of a run, written while the run proceeds.

It contains the operations and the contract (``base``), implementations on SQLite and Redis, and the writers through
which the controller's event loop records operations.
"""

from headrace.flow.ledger.base import Conservation, GroupAttempt, Ledger, Lengths, ResumeState, UnitCounts
from headrace.flow.ledger.sqlite import SqliteLedger
from headrace.flow.ledger.writer import InlineWriter, LedgerWriter, ThreadedWriter

__all__ = [
    "Conservation",
    "GroupAttempt",
    "InlineWriter",
    "Ledger",
    "LedgerWriter",
    "Lengths",
    "ResumeState",
    "SqliteLedger",
    "ThreadedWriter",
    "UnitCounts",
]
