"""The ledger: what became of every group, episode and token, on disk as it happens."""

from headrace.flow.ledger.base import Attempt, Conservation, Fates, Ledger, Lengths, Recalled
from headrace.flow.ledger.sqlite import SqliteLedger
from headrace.flow.ledger.writer import InlineWriter, LedgerWriter, ThreadedWriter

__all__ = [
    "Attempt",
    "Conservation",
    "Fates",
    "InlineWriter",
    "Ledger",
    "LedgerWriter",
    "Lengths",
    "Recalled",
    "SqliteLedger",
    "ThreadedWriter",
]
