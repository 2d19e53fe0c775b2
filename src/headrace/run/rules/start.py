"""The tables of the rules that depend on more than the settings: :data:`MACHINE`, :data:`MODEL` and :data:`ROWS`.

``prepare`` checks them before any process starts. See :mod:`headrace.run.rules` for how to add a rule. A function that
returns ``Broken`` is the test of a rule: it returns false if the rule holds, and otherwise a mapping with values for
the rule's error message. A *row* is the data of one task, with its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.base.types.task import Task
from headrace.flow.columns import ColumnsConfig
from headrace.models import context_length
from headrace.models.devices import CPU, Devices
from headrace.models.rope import ContextLimit
from headrace.rollout.environments.registry import BUILT_IN, ENVIRONMENTS
from headrace.run.rules import Broken, SettingsRule
from headrace.run.rules.sections import RunSections


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts that the rules in :data:`MACHINE` read: the settings and the machine, which are known before any file
    is read."""

    config: RunSections
    """The settings of the run."""
    cores: int
    """The number of processor cores of this machine."""
    devices: Devices
    """The devices of the engines and of the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts that the rules in :data:`MODEL` read: the settings, the tokenizer's chat template and the kind of
    model, which are known before the rows are read."""

    config: RunSections
    """The settings of the run."""
    chat_template: str | None
    """The template by which the tokenizer writes messages; ``None`` if it has none."""
    routes: bool
    """Whether the model is a mixture of experts whose routing can be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """The facts that the rules in :data:`ROWS` read: the settings, the rows with their prompts, and the limits of the
    model. Lengths are in tokens."""

    config: RunSections
    """The settings of the run."""
    tasks: Sequence[Task]
    """The rows to train on; empty if nothing is trained."""
    eval_tasks: Sequence[Task]
    """The held-out rows."""
    limit: ContextLimit
    """The longest sequence that the model can read, in tokens, and the reason for this limit."""
    vocab_size: int
    """The number of tokens in the model's vocabulary."""

    @property
    def shortest_prompt(self) -> int:
        """The length of the shortest prompt to train on (of the held-out prompts, if nothing is trained), in tokens."""
        return min(len(task.prompt_ids_T) for task in self.tasks or self.eval_tasks)

    @property
    def longest_prompt(self) -> int:
        """The length of the longest prompt, held-out rows included, in tokens."""
        return max(len(task.prompt_ids_T) for task in [*self.tasks, *self.eval_tasks])

    @property
    def longest_sample(self) -> int:
        """The maximum length of prompt and answer together that the learner may receive, in tokens; 0 if nothing is
        trained."""
        if not self.tasks:
            return 0
        longest = max(len(task.prompt_ids_T) for task in self.tasks)
        return min(self.context, longest + self.config.engine.max_new_tokens)

    @property
    def context(self) -> int:
        """The maximum length of prompt and answer together in this run, in tokens: ``engine.max_context``, or if that
        is unset the length that the prompts need, at most the model's limit."""
        engine, possible = self.config.engine, self.limit.length
        if engine.max_context is not None:
            return engine.max_context
        return possible if self.config.env.remote else min(possible, self.longest_prompt + engine.max_new_tokens)


def _make_threads_test(name: str) -> Callable[[MachineFacts], Broken]:
    """Return the test of a rule that is broken if the setting ``launch.NAME`` (``name``) requests more threads than
    this machine has cores."""

    def broken(facts: MachineFacts) -> Broken:
        """Return the numbers of threads and cores if there are more threads than cores, else false."""
        threads = facts.config.launch.model_dump()[name]
        return threads is not None and threads > facts.cores and {"threads": threads, "cores": facts.cores}

    return broken


def _make_threads_rule(name: str) -> SettingsRule[MachineFacts]:
    """Return the rule that the number of threads ``launch.NAME`` (``name``) may not exceed the number of this machine's
    cores."""
    return SettingsRule(
        broken=_make_threads_test(name),
        reason=f"launch.{name}={{threads}}, and this machine has {{cores}} cores",
        remedy=f"set launch.{name} <= {{cores}}",
    )


def _lends_cores_with_gpus(facts: MachineFacts) -> Broken:
    """Return the names of the run's GPUs if ``launch.lend_cores`` is set and the run uses GPUs; else false. Only parts
    that compute on processor cores can lend cores to each other."""
    gpus = sorted({*facts.devices.engines, *facts.devices.learner} - {CPU})
    return facts.config.launch.lend_cores and bool(gpus) and {"gpus": ", ".join(gpus)}


def _sends_messages(kind: str) -> bool:
    """Return whether environments of ``kind`` (``env.kind``) send chat messages to the model, for which its tokenizer
    needs a chat template."""
    if kind in BUILT_IN:
        return kind in ("env", "program", "bridge")
    # a package registers an environment class, which sends messages, or a rollout function, which may not
    return isinstance(ENVIRONMENTS.load(kind), type)


MACHINE: tuple[SettingsRule[MachineFacts], ...] = (
    _make_threads_rule("engine_threads"),
    _make_threads_rule("learner_threads"),
    SettingsRule(
        broken=_lends_cores_with_gpus,
        reason="launch.lend_cores=true, and the engine or the learner computes on {gpus}",
        remedy="leave launch.lend_cores out",
    ),
    SettingsRule(
        broken=lambda facts: facts.config.launch.lend_cores and not facts.config.engine.can.embedded,
        reason="launch.lend_cores=true, and engine.kind={engine.kind!r} keeps the cores that it was started with",
        remedy="leave launch.lend_cores out",
    ),
    SettingsRule(
        broken=lambda facts: facts.config.launch.lend_cores and facts.config.model.deterministic,
        reason="launch.lend_cores=true, and model.deterministic=true promises the same bits whatever the other "
        "parts do",
        remedy="leave launch.lend_cores out",
    ),
)
"""The rules about the settings and the machine, which are checked before any file is read."""


def _has_idle_store(facts: ModelFacts) -> Broken:
    """Return whether ``flow.columns.keep`` is set although the run records neither kept-sets nor experts."""
    learner, engine = facts.config.learner, facts.config.engine
    truncated = engine.top_k > 0 or engine.top_p < 1 or engine.min_p > 0
    records = (truncated and learner.keep_sampling_mask) or (facts.routes and learner.keep_routing)
    return facts.config.flow.columns.keep != ColumnsConfig().keep and not records


MODEL: tuple[SettingsRule[ModelFacts], ...] = (
    SettingsRule(
        broken=lambda facts: _sends_messages(facts.config.env.kind) and facts.chat_template is None,
        reason="env.kind={env.kind!r} speaks in messages, and the tokenizer of model.path={model.path!r} has no chat "
        "template",
        remedy="use a chat model, or add a chat_template.jinja to the model directory",
    ),
    SettingsRule(
        broken=_has_idle_store,
        reason="flow.columns.keep is set, and this run records neither kept-sets (engine.top_k, top_p or min_p with "
        "learner.keep_sampling_mask) nor experts (a mixture with learner.keep_routing) that could lie in a store",
        remedy="leave flow.columns.keep out",
    ),
)
"""The rules about the model, which are checked after the tokenizer is loaded."""


def _has_too_few_rows(facts: RowFacts) -> Broken:
    """Return the numbers for the error message if all epochs over the rows yield fewer groups than one batch needs, so
    that no step could start; else false."""
    epochs, batch, num_rows = facts.config.data.epochs, facts.config.flow.groups_per_step, len(facts.tasks)
    if not num_rows or epochs is None or epochs * num_rows >= batch:
        return False
    return {"num_rows": num_rows, "num_groups": epochs * num_rows, "needed": -(-batch // num_rows)}


def _exceeds_context_limit(facts: RowFacts) -> Broken:
    """Return the model's context limit, with its reason, if ``engine.max_context`` is larger than this limit; else
    false."""
    requested, limit = facts.config.engine.max_context, facts.limit
    return (
        requested is not None and requested > limit.length and {"possible": limit.length, "why": _format_reason(limit)}
    )


def _has_no_fitting_prompt(facts: RowFacts) -> Broken:
    """Return the lengths for the error message if even the shortest prompt and an answer of ``engine.max_new_tokens``
    are together longer than the context; else false."""
    if facts.shortest_prompt + facts.config.engine.max_new_tokens <= facts.context:
        return False
    why = _format_reason(facts.limit) if facts.context == facts.limit.length else ""
    return {"shortest": facts.shortest_prompt, "context": facts.context, "why": why}


def _format_reason(limit: ContextLimit) -> str:
    """Return the reason for a model's context limit as the end of a sentence, after a colon; empty without a reason."""
    return f": {limit.reason}" if limit.reason else ""


def _find_unknown_token(facts: RowFacts) -> Broken:
    """Return the first row whose prompt has a token id outside the model's vocabulary, with that id; false if there is
    no such row. A tokenizer that belongs to another model produces such ids."""
    for tasks, key in ((facts.tasks, "path"), (facts.eval_tasks, "eval_path")):
        for task in tasks:
            if (token := int(task.prompt_ids_T.max(initial=-1))) >= facts.vocab_size:
                return {"key": key, "row": task.row_index + 1, "token": token, "known": facts.vocab_size}
    return False


def _has_short_critic(facts: RowFacts) -> Broken:
    """Return the context length of the critic, a model that predicts values, and the maximum length of a sample, if the
    first is smaller; else false. The result is also false if the critic has no model of its own."""
    path = facts.config.learner.critic.path
    if not path or (critic_context := context_length(path)) >= facts.context:
        return False
    return {"critic_context": critic_context, "context": facts.context}


def _has_too_long_sample(facts: RowFacts) -> Broken:
    """Return the lengths for the error message if the longest possible sample (prompt and answer) does not fit into one
    micro-batch of ``learner.tokens_per_microbatch``; else false."""
    needed = facts.longest_sample
    if needed <= facts.config.learner.tokens_per_microbatch:
        return False
    return {"needed": needed, "longest": max(len(task.prompt_ids_T) for task in facts.tasks)}


ROWS: tuple[SettingsRule[RowFacts], ...] = (
    SettingsRule(
        broken=_has_too_few_rows,
        reason="data.epochs={data.epochs} over {num_rows} rows makes {num_groups} groups, fewer than one batch "
        "(flow.groups_per_step={flow.groups_per_step}): no step could ever start",
        remedy="set data.epochs >= {needed}, lower flow.groups_per_step, or give more rows",
    ),
    SettingsRule(
        broken=_exceeds_context_limit,
        reason="engine.max_context={engine.max_context} is more than the model's context of {possible}{why}",
        remedy="set engine.max_context <= {possible}",
    ),
    SettingsRule(
        broken=_has_no_fitting_prompt,
        reason="no prompt fits: the shortest has {shortest} tokens, with engine.max_new_tokens={engine.max_new_tokens} "
        "more than the context of {context}{why}",
        remedy="lower engine.max_new_tokens, shorten the prompts, or use a model with a longer context",
    ),
    SettingsRule(
        broken=_find_unknown_token,
        reason="the prompt of row {row} of data.{key} holds token {token}, and the vocabulary of "
        "model.path={model.path!r} has {known}: its tokenizer has more",
        remedy="copy the tokenizer that belongs to the model, or resize its embedding",
    ),
    SettingsRule(
        broken=_has_short_critic,
        reason="learner.critic.path={learner.critic.path!r} was made for {critic_context} tokens, and samples "
        "may have {context}",
        remedy="choose a critic for >= {context} tokens, or set engine.max_context <= {critic_context}",
    ),
    SettingsRule(
        # a sample is trained in one pass: without this rule the first answer that is too long would end the run
        broken=_has_too_long_sample,
        reason="learner.tokens_per_microbatch={learner.tokens_per_microbatch}, and a sample may have {needed} tokens: "
        "a prompt of {longest} and engine.max_new_tokens={engine.max_new_tokens}",
        remedy="set learner.tokens_per_microbatch >= {needed}, or lower engine.max_new_tokens",
    ),
)
"""The rules about the rows, which are checked after the rows are read."""
