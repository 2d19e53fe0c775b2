"""The checks of the gate that no linter has: sizes, the direction of imports, owners and bounds, words.

    source ──parse──▶ rule, rule, rule ──findings──▶ less what is excused beside it ──▶ printed, or none

A rule is a function from one :class:`~tools.gate.source.Source` to its findings. A finding that has a good reason is
excused beside it, by a comment that names the rule and the reason:

    def f(...):  # gate: parameters - the signature is the protocol's

At the start of a line by itself it excuses the rule in the whole file. A comment that excuses nothing is a finding.
"""

from collections.abc import Iterable, Sequence

from tools.gate.budgets import budgets
from tools.gate.danger import danger
from tools.gate.imports import imports
from tools.gate.owners import owners
from tools.gate.source import Finding, Rule, Source, excuse
from tools.gate.words import words

RULES: tuple[Rule, ...] = (budgets, danger, imports, owners, words)

__all__ = ["RULES", "Finding", "Source", "check"]


def check(sources: Iterable[Source], rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Every finding of ``rules`` in ``sources`` that is not excused, and every excuse that excuses nothing."""
    return [
        finding for source in sources for finding in excuse(source, [found for rule in rules for found in rule(source)])
    ]
