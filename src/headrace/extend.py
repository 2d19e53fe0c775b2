"""The contracts that an extender implements, each with the group of entry points that registers implementations.

A package registers an implementation with one line of its ``pyproject.toml``, and a run file names it::

    [project.entry-points."headrace.losses"]
    huber = "my_package.huber:Huber"

docs/extending.md shows a whole package. The class of a contract is imported when it is first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.plugins import lazy_attributes

if TYPE_CHECKING:
    from headrace.algo.advantages.base import AdvantageSection
    from headrace.algo.corrections.section import CorrectionSection
    from headrace.algo.losses.section import LossSection
    from headrace.engine.config import EngineKind
    from headrace.flow.filters.base import FilterSection
    from headrace.flow.pacing import PacingSection
    from headrace.flow.policies.base import StalenessPolicy
    from headrace.launch.config import Launcher
    from headrace.rollout.answers.base import Parser
    from headrace.rollout.environments.bridges import Bridge
    from headrace.rollout.environments.interface import Env
    from headrace.rollout.scoring.base import RewardSection
    from headrace.run.cli.commands import Verb
    from headrace.run.observe.alarms.rows import AlarmRow
    from headrace.run.observe.writers.base import WriterSection
    from headrace.run.session.recipes import Recipe
    from headrace.sync.config import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A contract that a package implements to extend Headrace in one respect, such as a loss: its base class, and the
    group of entry points under which the package registers its implementation."""

    module: str
    """The module that declares the base class, imported when the class is first used."""
    group: str
    """The group of entry points in ``pyproject.toml``, such as ``headrace.losses``."""
    meaning: str
    """A sentence for the documentation that says what an implementation is."""


CONTRACTS = {
    "LossSection": Contract(
        module="headrace.algo.losses.section",
        group="headrace.losses",
        meaning="A loss: a table of settings that is called with the columns of a micro-batch "
        "(:class:`~headrace.algo.base.LossInputs`) and returns one value for every token.",
    ),
    "AdvantageSection": Contract(
        module="headrace.algo.advantages.base",
        group="headrace.advantages",
        meaning="An advantage: a table of settings that is called with the rewards of some episodes "
        "(:class:`~headrace.algo.advantages.outcomes.Outcomes`) and returns the credit of each.",
    ),
    "CorrectionSection": Contract(
        module="headrace.algo.corrections.section",
        group="headrace.corrections",
        meaning="A correction: a table of settings that returns a weight or a mask for tokens which older "
        "weights sampled.",
    ),
    "StalenessPolicy": Contract(
        module="headrace.flow.policies.base",
        group="headrace.policies",
        meaning="A staleness policy: pure functions of the flow's state that decide which groups start, "
        "which are trained next, and which leave.",
    ),
    "PacingSection": Contract(
        module="headrace.flow.pacing",
        group="headrace.pacings",
        meaning="A pacing: a table of settings that makes a run's memory of durations, which decides when a group that "
        "the policy would admit starts.",
    ),
    "FilterSection": Contract(
        module="headrace.flow.filters.base",
        group="headrace.filters",
        meaning="A filter: a pure function of one scored group that decides whether it, or which of its "
        "episodes, is trained.",
    ),
    "Env": Contract(
        module="headrace.rollout.environments.interface",
        group="headrace.environments",
        meaning="An environment: a class with ``reset`` and ``step``, or an ``async def rollout(task, "
        "policy)``, that ``env.kind`` names.",
    ),
    "Bridge": Contract(
        module="headrace.rollout.environments.bridges",
        group="headrace.bridges",
        meaning='A bridge: how environments of another library are made from ``env.entry = "LIBRARY/WHAT"``.',
    ),
    "RewardSection": Contract(
        module="headrace.rollout.scoring.base",
        group="headrace.scorers",
        meaning="A scorer: one component of the reward, a table ``[[env.rewards]]`` whose grader scores "
        "completions in a process of its own.",
    ),
    "Parser": Contract(
        module="headrace.rollout.answers.base",
        group="headrace.parsers",
        meaning="A parser: what finds the calls of tools in the text of an answer; ``env.tool_parser`` "
        "names what makes one.",
    ),
    "Transport": Contract(
        module="headrace.sync.config",
        group="headrace.transports",
        meaning="A transport: one object with both sides of a way for weights, its address rule, whether it crosses "
        "machines, its settings and its costs; ``sync.transport`` names it.",
    ),
    "EngineKind": Contract(
        module="headrace.engine.config",
        group="headrace.engines",
        meaning="A kind of engine: one object with its abilities, its settings and how one is opened; "
        "``engine.kind`` names it.",
    ),
    "Launcher": Contract(
        module="headrace.launch.config",
        group="headrace.launchers",
        meaning="A launcher: one object that starts the processes of a run; ``launch.kind`` names it.",
    ),
    "WriterSection": Contract(
        module="headrace.run.observe.writers.base",
        group="headrace.writers",
        meaning="A writer: a table ``[[observe.writers]]`` that opens a place to which the metrics of every step go.",
    ),
    "AlarmRow": Contract(
        module="headrace.run.observe.alarms.rows",
        group="headrace.alarms",
        meaning="An alarm: a small state machine over the metrics of steps, with advice; "
        "``observe.alarms.on`` names it.",
    ),
    "Verb": Contract(
        module="headrace.run.cli.commands",
        group="headrace.commands",
        meaning="A verb of the program ``headrace``: a function with typer's arguments and options, and its "
        "place in ``--help``.",
    ),
    "Recipe": Contract(
        module="headrace.run.session.recipes",
        group="headrace.recipes",
        meaning="A recipe for ``--like NAME``: the settings of one system; an entry point is a function "
        "that returns several by their names.",
    ),
}
"""Every contract, by the name of its base class."""

__all__ = [
    "CONTRACTS",
    "AdvantageSection",
    "AlarmRow",
    "Bridge",
    "Contract",
    "CorrectionSection",
    "EngineKind",
    "Env",
    "FilterSection",
    "Launcher",
    "LossSection",
    "PacingSection",
    "Parser",
    "Recipe",
    "RewardSection",
    "StalenessPolicy",
    "Transport",
    "Verb",
    "WriterSection",
]

__getattr__ = lazy_attributes(__name__, {name: contract.module for name, contract in CONTRACTS.items()})
