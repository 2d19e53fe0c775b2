"""The ledger: what became of every group, episode and token, on disk as it happens."""

from headrace.flow.ledger.base import Conservation, Fates, GroupAttempt, Ledger, Lengths, Recalled
from headrace.flow.ledger.sqlite import SqliteLedger
from headrace.flow.ledger.writer import InlineWriter, LedgerWriter, ThreadedWriter

__all__ = [
    "Conservation",
    "Fates",
    "GroupAttempt",
    "InlineWriter",
    "Ledger",
    "LedgerWriter",
    "Lengths",
    "Recalled",
    "SqliteLedger",
    "ThreadedWriter",
]
