"""The text of a dry run (``headrace train --dry-run``): a description of the run, the settings that differ from their
defaults, and all settings on request. The functions return sentences or lines of text for the user."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pydantic

from headrace.base.config import Section, descriptions
from headrace.base.environ import num_cores
from headrace.base.errors import ConfigError
from headrace.base.plugins import Registry
from headrace.launch.config import threads
from headrace.models.devices import CPU
from headrace.models.hub import pinned_path
from headrace.rollout.environments.agents import TrainedAgent
from headrace.run.observe.words import plural
from headrace.run.rules.settings import find_idle_clip
from headrace.run.session.config import RunConfig
from headrace.run.session.engine_fit import find_slowdowns
from headrace.run.session.prepare import Prepared


def explain(prepared: Prepared) -> str:
    """Return a description of the run ``prepared``, one topic in each line: its tasks and steps, its staleness bound,
    its engines and learner with their devices, and the other models in it."""
    config = prepared.config
    flow, cores = config.flow, num_cores()
    episodes = flow.groups_per_step * flow.group_size
    epochs = config.run.steps * flow.groups_per_step / len(prepared.tasks)
    pace = "generation and training take turns" if flow.largest_age == 0 else (
        f"generation runs up to {plural(flow.effective_lead, 'batch', 'batches')} ahead; no token is trained at an "
        f"age over {flow.largest_age}"
    )  # fmt: skip
    cluster, engines, ranks = config.launch.cluster, config.engine.count, config.learner.parallel.world
    lines = [
        f"{plural(len(prepared.tasks), 'task')}, {len(prepared.eval_tasks):,} held out; "
        f"{plural(config.run.steps, 'step')} of {plural(flow.groups_per_step, 'group')} × {flow.group_size} = "
        f"{plural(episodes, 'episode')} a step, {plural(float(f'{epochs:.3g}'), 'epoch')}.",
        *_selection_sentences(config, len(prepared.tasks)),
        f"Up to {plural(config.engine.max_new_tokens, 'new token')}, {prepared.max_context} with the prompt; {pace}.",
        *(
            _machine_sentences(prepared, cores)
            if cluster is None
            else [cluster.sentence(config.launch, engines, ranks)]
        ),
        *(f"Learns less than it could: {words}." for words in find_idle_clip(config)),
        *_joining_sentences(config),
        *filter(None, [config.engine.server.sentence(config.engine.kind)]),
    ]
    learner = config.learner.serving(config.algo.columns)
    uses = {"reference": "the reference (metric kl_ref)", "old": "π_old", "teachers[0]": "the teacher"}
    lines += [f"{uses[name][0].upper()}{uses[name][1:]} is {policy}." for name, policy in learner.policies.items()]
    served = learner.served_teachers.items()
    lines += [
        f"Teacher {name!r} is {teacher}." if name else f"The teacher is {teacher}." for name, (teacher, _) in served
    ]
    own = config.model.adapter_agents
    lines += [f"Agent {agent.name!r} is {agent}." for agent in config.env.agents if agent.name not in own]
    lines += [f"Agent {name!r} trains an adapter of its own, beside the policy's." for name in own]
    return "\n".join(lines)


PREVIEWS = Registry[Callable[[Prepared], str]](
    group="headrace.previews", setting="the preview", check=lambda made: None if callable(made) else "cannot be called"
)
"""The registry of functions, also of installed packages, that return more text about a prepared run. A dry run prints
these texts after the text of :func:`explain`."""


def make_previews(prepared: Prepared) -> str:
    """Return the texts of all registered make_previews (:data:`PREVIEWS`) about the run, in the order of their names,
    each one or more lines. The text of a preview that cannot be loaded is the reason."""
    texts: list[str] = []
    for name in PREVIEWS:
        try:
            texts.append(PREVIEWS.load(name)(prepared))
        except ConfigError as error:
            texts.append(f"No preview {name!r}: {error.problem}; {error.remedy}.")
    return "\n".join(texts)


class Changed(NamedTuple):
    """A setting of a run whose value differs from its default, as a dry run prints it."""

    name: str
    """The dotted name, in the form that ``--set`` accepts."""
    value: Any
    """The value in this run, in its JSON form."""
    default: Any
    """The default value, in its JSON form; ``None`` also if there is no default."""
    words: str
    """One sentence of the setting's description (:func:`_choose_sentence`)."""


def find_non_default_settings(config: RunConfig) -> list[Changed]:
    """Return the settings of a run that differ from their defaults, in the order of the sections of a run file;
    ``model.path``, which has no default, comes first."""
    usual = RunConfig.model_validate({"model": {"path": config.model.path}})
    return [
        Changed("model.path", pinned_path(config.model.path), None, _choose_sentence(config.model, "path")),
        *_find_changed(config, usual, ""),
    ]


def describe_non_default_settings(config: RunConfig, width: int) -> str:
    """Return text with a line for each setting in ``config`` that differs from its default, followed by the meaning of
    the setting, wrapped to about ``width`` columns of the terminal."""
    lines = ["Differs from the default, by what is set here:"]
    for name, value, default, words in find_non_default_settings(config):
        usual = "" if name == "model.path" else f"  (default {_toml_value(default)})"
        lines.append(f"  {name} = {_toml_value(value)}{usual}")
        lines += textwrap.wrap(words, max(40, min(width, 120)), initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def format_all_settings(config: RunConfig) -> str:
    """Return all settings of the run, defaults included, as text in the form of a run file."""
    lines: list[str] = []
    for section, settings in config.model_dump(mode="json").items():
        lines += ["", f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in settings.items())]
    return "\n".join(lines[1:])


def _find_changed(table: pydantic.BaseModel, default: pydantic.BaseModel, prefix: str) -> Iterator[Changed]:
    """Yield the settings in ``table``, a section or a table of the run's settings, that differ from ``default``, the
    same table with default values. ``prefix`` begins their dotted names; empty for the whole run file."""
    defaults = default.model_dump(mode="json")
    for key, dumped in table.model_dump(mode="json").items():
        value, default_value = dict(table)[key], dict(default)[key]
        if table.model_dump()[key] == default.model_dump()[key]:
            continue
        if isinstance(value, pydantic.BaseModel) and type(value) is type(default_value):
            yield from _find_changed(value, default_value, f"{prefix}{key}.")
        else:
            printed = _make_printed_value(value, dumped)
            yield Changed(f"{prefix}{key}", printed, defaults[key], _choose_sentence(table, key))


def _make_printed_value(value: Any, dumped: Any) -> Any:
    """Return a setting's value in the form to print: ``dumped``, its JSON form, or if ``value`` is a table or a list of
    tables, only the entries of these tables that differ from their defaults."""
    if isinstance(value, pydantic.BaseModel):
        return _non_default(value)
    if isinstance(value, list | tuple) and value and all(isinstance(each, pydantic.BaseModel) for each in value):
        return [_non_default(each) for each in value]
    return dumped


def _non_default(table: pydantic.BaseModel) -> dict[str, Any]:
    """Return the entries of a table of settings that differ from their defaults, in JSON form. The entry ``kind``,
    which selects the class of the table, is always included."""
    fields = type(table).model_fields
    shown = table.model_dump(mode="json")
    return {key: shown[key] for key, value in table if key == "kind" or value != fields[key].default}


def _choose_sentence(section: pydantic.BaseModel, key: str) -> str:
    """Return one sentence of the description of the setting ``key`` in ``section``: the sentence about its present
    value, such as ``plain: always lines``, if there is such a sentence, else the first sentence; empty without a
    description."""
    kind = type(section)
    description = descriptions(kind).get(key, "") if issubclass(kind, Section) else ""
    described = " ".join(description.replace("``", "").split())
    sentences = [each.rstrip(".;") for each in re.split(r"(?<=[.;]) ", described)]
    about = (each for each in sentences if each.startswith(f"{dict(section)[key]}: "))
    return next(about, sentences[0])


def _joining_sentences(config: RunConfig) -> list[str]:
    """Return a list with the sentence about other machines that may join the run with workers for environments; an
    empty list if ``launch.join`` is not set."""
    if not config.launch.join:
        return []
    division = "all of them run there" if not config.env.workers else f"beside {config.env.workers} of this machine"
    return [f"Other machines may join at {config.launch.join} with workers for environments, {division}."]


def _machine_sentences(prepared: Prepared, cores: int) -> list[str]:
    """Return the sentences about the threads and the devices of engines and learner, and about the reasons why the run
    is slower or less isolated than it could be. ``cores`` is the number of this machine's processor cores."""
    config = prepared.config
    return [
        f"{_engine_words(config, threads(config.launch.engine_threads, cores))}; learner: "
        f"{plural(threads(config.launch.learner_threads, cores), 'thread')}; this machine has {plural(cores, 'core')}.",
        *_device_sentences(prepared),
        *(f"Slower than it could be: {words}." for words in find_slowdowns(config, prepared.devices)),
        *(f"Less separate than it could be: {words}." for words in prepared.isolation_warnings),
    ]


def _engine_words(config: RunConfig, num_threads: int) -> str:
    """Return in words the number of engines, including the engines of agents and teachers, and the number of threads of
    each engine; ``num_threads`` is the number of threads of all engines together."""
    count = config.engine.count + sum(not isinstance(agent, TrainedAgent) for agent in config.env.agents)
    count += len(config.learner.served_teachers)
    if count == 1:
        return f"Engine: {plural(num_threads, 'thread')}"
    return f"{count} engines of {plural(max(1, num_threads // count), 'thread')} each"


def _device_sentences(prepared: Prepared) -> list[str]:
    """Return the sentences about the devices of engines and learner, and for each GPU with an engine the sentence about
    the memory of its weights and its KV cache."""
    devices = prepared.devices
    lines = [f"{str(devices)[0].upper()}{str(devices)[1:]}."]
    for device in dict.fromkeys(each for each in devices.engines if each != CPU):
        share = prepared.config.engine.for_engine(devices.engines.index(device), devices).cache_share
        rest = "; what remains is the learner's" if device in devices.learner else ""
        count = devices.engines.count(device)
        who = "The engine keeps" if count == 1 else f"Each of {count} engines keeps"
        lines.append(
            f"{who} two copies of the weights on {device}, and a cache of at most {share:.0%} of "
            f"the memory that is free then{rest}."
        )
    return lines


def _selection_sentences(config: RunConfig, num_rows: int) -> list[str]:
    """Return the sentences about settings that limit which groups are trained: the number of epochs over ``num_rows``
    rows, after which the run ends, and filters, which drop groups; an empty list without such settings."""
    lines: list[str] = []
    if config.data.epochs is not None:
        groups = config.data.epochs * num_rows
        steps = groups // config.flow.groups_per_step
        lines.append(
            f"data.epochs={config.data.epochs} makes {plural(groups, 'group')}: the run ends after "
            f"{plural(steps, 'step')} at most."
        )
    if config.flow.filters:
        names = ", ".join(each.kind for each in config.flow.filters)
        lines.append(f"Filters, in this order: {names}; a dropped group is made up for by another.")
    return lines


def _toml_value(value: object) -> str:
    """Return a setting's value as text in the form of a run file; ``(unset)`` for ``None``, which a run file cannot
    express."""
    return "(unset)" if value is None else json.dumps(value, ensure_ascii=False)
