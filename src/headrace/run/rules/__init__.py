"""The rules of a run file about settings of different sections that exclude or need each other.

    run file ──load_config──▶ SETTINGS, once ──▶ RunConfig ──prepare──▶ MACHINE ──▶ MODEL ──▶ ROWS ──▶ the run starts

Each rule is a row of one of four tables. The facts that a rule reads decide on its table:

    table      in                           may read
    SETTINGS   headrace.run.rules.settings  the settings alone, so that ``load_config`` refuses at once
    MACHINE    headrace.run.rules.start     also the cores of this machine, and where engine and learner compute
    MODEL      headrace.run.rules.start     also the tokenizer of the model
    ROWS       headrace.run.rules.start     also the rows, and how long prompt and answer together may be

``headrace train`` and ``headrace train --dry-run`` check each table once, from the first row to the last. The first
rule that is broken ends them with an error.

To add a rule, add a row to the first table whose facts suffice:

    SettingsRule(
        broken=lambda c: c.sync.codec == "adapter" and c.model.lora is None,
        reason="sync.codec='adapter' sends adapters alone, and model.lora is not set",
        remedy="set model.lora, or sync.codec = 'full'",
    )

``reason`` and ``remedy`` are format strings in which ``{flow.max_age}`` is replaced by the value of that setting.
``broken`` may return a mapping in place of ``True``, with more values for the format strings. A rule about one section
alone is not a row here, but a validator in the class of that section. Engines and launchers check by themselves which
settings they support.

A key that was renamed is a row of :data:`FORMER_KEYS`: a run file with the former key is refused with the present name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.base.errors import ConfigError
from headrace.run.rules.sections import RunSections

F = TypeVar("F")
Broken = bool | Mapping[str, Any]
"""The result of a rule's test: whether the rule is broken. A mapping means that it is, and contains values by name for
the rule's format strings."""

FORMER_KEYS: Mapping[str, str] = {}
"""The present name of each former key of a run file: ``{"flow.staleness": "flow.max_age"}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRule(Generic[F]):
    """A rule about settings of different sections: a test that decides whether a run file breaks the rule, and the text
    of the error that refuses such a file. ``F`` is the type of the facts that the test reads."""

    broken: Callable[[F], Broken]
    """The test of the rule. It receives the facts of the rule's table."""
    reason: str
    """The format string of the problem: the settings with their values, and why they exclude each other."""
    remedy: str
    """The format string of the remedy: which setting to change, and to what."""


def refuse(rules: Iterable[SettingsRule[F]], config: RunSections, facts: F) -> None:
    """Check ``rules`` in order, and raise :class:`~headrace.base.errors.ConfigError` for the first rule that ``facts``
    break. ``config`` contains the settings of the run, whose values are filled into the text of the error."""
    for rule in rules:
        broken = rule.broken(facts)
        if broken is not False:
            names = {name: getattr(config, name) for name in type(config).model_fields}
            names |= {} if broken is True else broken
            raise ConfigError(rule.reason.format_map(names), remedy=rule.remedy.format_map(names))
