"""The checks that no linter has: sizes, direction of imports, owners and bounds, dangerous calls, words.

    source ──parse──▶ rules ──findings──▶ without the excused ones ──▶ printed

A rule is a function from one :class:`~tools.gate.source.Source` to its findings. A justified finding is excused by a
comment on its line that names the rule and the reason:

    def f(...):  # gate: parameters - the signature is the protocol's

A comment on a line of its own, without indentation, excuses the rule in the whole file. A comment that excuses nothing
is itself a finding.
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
    """Return every finding of ``rules`` in ``sources`` that is not excused, and a finding for every unused excuse."""
    return [
        finding for source in sources for finding in excuse(source, [found for rule in rules for found in rule(source)])
    ]
