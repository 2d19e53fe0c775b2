"""The models of teachers and of frozen agents, which run on engines of their own, and the checks of these models.

A *teacher* is a model whose logprobs the policy learns from. A *frozen agent* answers in episodes beside the policy and
is not trained. A *row* is the data of one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import ConfigError, DataError, nearest
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.base.types.versions import FROZEN, INITIAL
from headrace.control.teaching import TeacherCallConfig
from headrace.launch.order import TeacherOrder
from headrace.learner.auxiliary.config import FrozenTeacher, OwnEngine, ServedTeacher
from headrace.models import ModelConfig, context_length
from headrace.models.heads import refuse_headless
from headrace.models.load import refuse_other_vocabulary
from headrace.models.settings import errors_naming, read_config
from headrace.rollout.environments.agents import ModelAgent
from headrace.rollout.environments.data import Row
from headrace.rollout.environments.prompts import make_tasks
from headrace.rollout.rendering import Tokenizer
from headrace.run.session.config import RunConfig


def make_teacher_orders(
    config: RunConfig, tasks: Sequence[Task], tokenizer: Tokenizer, max_context: int
) -> dict[str, TeacherOrder]:
    """Return the launch order of each teacher in ``config`` that has an engine of its own, by the teacher's name: its
    model, its context length, and the settings of requests to it. ``tasks`` are the rows to train on, with prompts of
    the policy's ``tokenizer``; ``max_context`` is the longest sample of the policy in tokens, which a teacher must be
    able to read.

    Raises :class:`~headrace.base.errors.ConfigError`, :class:`~headrace.base.errors.DataError` or
    :class:`~headrace.base.errors.ModelError` if a teacher has another vocabulary or too short a context, if a row names
    no teacher, and if a teacher's prompt cannot be made.
    """
    served = config.learner.served_teachers
    if len(served) > 1:
        _refuse_unnamed(tasks, config.learner.teacher_column, sorted(served))
    models = {name: resolve_teacher_model(teacher, config.model) for name, (teacher, _) in served.items()}
    sizes = [_vocabulary_size(model.path) for model in (config.model, *models.values())]
    num_entries = min(config.learner.top_k, *sizes) if served and "top_k" in config.algo.columns else 0
    orders: dict[str, TeacherOrder] = {}
    for name, (teacher, engine) in served.items():
        setting = f"learner.teachers {name!r}" if name else "learner.teachers[0]"
        own_tasks = tasks
        if len(served) > 1:
            own_tasks = [task for task in tasks if task.row[config.learner.teacher_column] == name]
        prompts = _make_teacher_prompts(config, engine, tasks, tokenizer, setting) if engine.prompt else None
        longest = max((len(prompts[task.row_index]) for task in own_tasks), default=0) if prompts else 0
        context = max(max_context, longest + config.engine.max_new_tokens if longest else 0)
        _refuse_model(config, teacher, models[name].path, setting, context)
        orders[name] = TeacherOrder(
            model=models[name],
            max_context=context,
            config=TeacherCallConfig(
                version=INITIAL if isinstance(teacher, FrozenTeacher) and teacher.path is None else FROZEN,
                num_entries=num_entries,
                below=sizes[0] if _vocabulary_size(models[name].path) > sizes[0] else 0,
                prompts=prompts,
                timeout_s=engine.timeout_s,
                retries=engine.retries,
            ),
        )
    return orders


def resolve_teacher_model(teacher: ServedTeacher, policy: ModelConfig) -> ModelConfig:
    """Return the model that a teacher's engine loads. Without a path, this is the policy with its initial weights;
    otherwise the path is the directory of a model, or of an adapter on the policy's base. ``policy`` is the model that
    is trained."""
    if teacher.path is None:
        return policy.keep_policy_adapter()
    if isinstance(teacher, FrozenTeacher) and policy.lora is not None:
        from headrace.models.lora import read_lora_config

        with errors_naming("learner.teachers: path"):
            return policy.model_copy(update={"lora": read_lora_config(Path(teacher.path))})
    return policy.model_copy(update={"path": teacher.path, "lora": None})


def _vocabulary_size(path: str) -> int:
    """Return the size of the vocabulary of the model in ``path``, from its configuration."""
    size: int = read_config(path).vocab_size
    return size


def _refuse_model(config: RunConfig, teacher: ServedTeacher, path: str, setting: str, context: int) -> None:
    """Raise an error if the teacher's model in ``path`` has another vocabulary than the policy, or cannot read
    ``context`` tokens. ``setting`` names the teacher in the error. The policy's own model is not checked."""
    if teacher.path is None or path == config.model.path:
        return
    with errors_naming(f"{setting} path"):
        refuse_other_vocabulary(path, config.model.path, f"{setting} path")
        max_tokens = context_length(path)
    if max_tokens < context:
        raise ConfigError(
            f"{setting} path={path!r} was made for {max_tokens} tokens, and it may be asked about {context}",
            remedy=f"choose a model for >= {context} tokens, set engine.max_context <= {max_tokens}, or shorten its "
            "prompt",
        )


def _refuse_unnamed(tasks: Sequence[Task], column: str, names: Sequence[str]) -> None:
    """Raise :class:`~headrace.base.errors.DataError` for the first row whose ``column`` does not contain one of
    ``names``, the names of the teachers. With several teachers, each row must name the teacher that scores its
    answers."""
    for task in tasks:
        named = task.row.get(column)
        if named not in names:
            said = "has no column" if column not in task.row else f"says {named!r} in column"
            raise DataError(
                f"row {task.row_index + 1} {said} {column!r}, which names the teacher of each row",
                remedy=f"{nearest(str(named), names)}; learner.teacher_column says which column it is",
            )


def _make_teacher_prompts(
    config: RunConfig, engine: OwnEngine, tasks: Sequence[Task], tokenizer: Tokenizer, setting: str
) -> list[IntColumn]:
    """Return for each row of ``tasks`` the token ids, by ``tokenizer``, of the prompt that the teacher reads in place
    of the row's prompt. The setting ``engine.prompt`` is the template of this prompt. ``setting`` names the teacher in
    errors."""
    if config.env.remote:
        raise ConfigError(
            f"{setting} engine.prompt replaces the row's prompt, and with env.kind={config.env.kind!r} the "
            "environment writes its own prompts",
            remedy="leave engine.prompt out, or set env.kind = 'single_turn'",
        )
    column = config.data.prompt_column
    rows = [{**task.row, column: _fill_prompt(engine.prompt, task, setting)} for task in tasks]
    teacher_tasks = make_tasks(rows, column, tokenizer, source=f"{setting} engine.prompt")
    return [np.asarray(task.prompt_ids_T) for task in teacher_tasks]


def _fill_prompt(template: str, task: Task, setting: str) -> str | list[dict[str, Any]]:
    """Return the teacher's prompt for the row of ``task``: ``template`` with its placeholders replaced. If the row's
    prompt is a list of messages, the result is a copy of this list in which the text of the last message is replaced by
    the filled template. ``setting`` names the teacher in errors."""
    if isinstance(task.prompt, str):
        return _fill_template(template, task.row, task.prompt, task, setting)
    *before, last = task.prompt
    if not isinstance(last["content"], str):
        raise DataError(
            f"{setting} engine.prompt: the last message of row {task.row_index + 1} is a "
            f"{type(last['content']).__name__}, in whose place no text can stand",
            remedy="give the content of messages as text",
        )
    return [*before, {**last, "content": _fill_template(template, task.row, last["content"], task, setting)}]


def _fill_template(template: str, row: Row, prompt: str, task: Task, setting: str) -> str:
    """Return ``template`` with each column name in braces replaced by the value in ``row``, and ``{prompt}`` by
    ``prompt``. Raises :class:`~headrace.base.errors.DataError` for a column that the row lacks; the error names
    ``setting`` and the number of ``task``."""
    try:
        return template.format_map({**row, "prompt": prompt})
    except KeyError as missing:
        raise DataError(
            f"{setting} engine.prompt asks for the column {missing}, which row {task.row_index + 1} has not",
            remedy="add it to every row, or leave it out of the prompt",
        ) from None


def resolve_frozen_agents(config: RunConfig) -> dict[str, ModelConfig]:
    """Return the model that the engine of each agent in ``config`` with weights of its own loads, by the agent's name.

    Raises :class:`~headrace.base.errors.ModelError` if the path of an adapter contains no adapter.
    """
    models = {agent.name: agent.resolve_model(config.model) for agent in config.env.agents}
    return {name: model for name, model in models.items() if model is not None}


def refuse_misfits(config: RunConfig, max_context: int) -> None:
    """Raise an error if the model of a frozen agent has another vocabulary than the policy's model, or cannot read
    ``max_context`` tokens; or if engines draft from prediction heads, and the model of the policy or of such an agent
    has none that can be used.

    The error is a :class:`~headrace.base.errors.ConfigError` or a :class:`~headrace.base.errors.ModelError`.
    """
    drafts = config.engine.speculation == "heads"
    if drafts:
        refuse_headless(config.model.path)
    for agent in config.env.agents:
        if not isinstance(agent, ModelAgent):
            continue
        setting = f"env.agents {agent.name!r} path"
        with errors_naming(setting):
            refuse_other_vocabulary(agent.path, config.model.path, setting)
            max_tokens = context_length(agent.path)
            if drafts:
                refuse_headless(agent.path)
        if max_tokens < max_context:
            raise ConfigError(
                f"{setting}={agent.path!r} was made for {max_tokens} tokens, and conversations may have {max_context}",
                remedy=f"choose a model for >= {max_context} tokens, or set engine.max_context <= {max_tokens}",
            )
