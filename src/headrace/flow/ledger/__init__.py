"""The ledger: the durable record of every group, episode and token, written as a run proceeds."""

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
