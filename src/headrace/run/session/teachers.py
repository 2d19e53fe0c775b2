"""The teachers of a run that have engines of their own: what they load, what they read, and what cannot be asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import ConfigError, DataError, nearest
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.base.types.versions import FROZEN, INITIAL
from headrace.control.teaching import TeacherTerms
from headrace.launch.order import TeacherOrder
from headrace.learner.companions.config import FrozenTeacher, OwnEngine, ServedTeacher
from headrace.learner.companions.fit import columns_of
from headrace.models import ModelConfig, context_length
from headrace.models.load import called, read_config, refuse_other_vocabulary
from headrace.rollout.environments.data import Row
from headrace.rollout.environments.prompts import PromptTokenizer, make_tasks
from headrace.run.session.config import RunConfig


def teacher_orders(
    config: RunConfig, tasks: Sequence[Task], tokenizer: PromptTokenizer, max_context: int
) -> dict[str, TeacherOrder]:
    """What the engine of each is, by name.

    Raises :class:`~headrace.base.errors.ConfigError`, :class:`~headrace.base.errors.DataError` or
    :class:`~headrace.base.errors.ModelError` for a teacher of other tokens, for a row whose teacher there is not, and
    for prompts that cannot be written.
    """
    served = config.learner.served_teachers
    if len(served) > 1:
        _refuse_unnamed(tasks, config.learner.teacher_column, sorted(served))
    models = {name: _model_of(teacher, config) for name, (teacher, _) in served.items()}
    sizes = [_vocabulary(model.path) for model in (config.model, *models.values())]
    wanted = min(config.learner.top_k, *sizes) if served and "top_k" in columns_of(config.algo) else 0
    orders: dict[str, TeacherOrder] = {}
    for name, (teacher, engine) in served.items():
        setting = f"learner.teachers {name!r}" if name else "learner.teachers[0]"
        asked = tasks if len(served) == 1 else [t for t in tasks if t.row[config.learner.teacher_column] == name]
        prompts = _prompts(config, engine, tasks, tokenizer, setting) if engine.prompt else None
        longest = max((len(prompts[task.row_index]) for task in asked), default=0) if prompts else 0
        context = max(max_context, longest + config.engine.max_new_tokens if longest else 0)
        _refuse_model(config, teacher, models[name].path, setting, context)
        orders[name] = TeacherOrder(
            model=models[name],
            max_context=context,
            terms=TeacherTerms(
                version=INITIAL if isinstance(teacher, FrozenTeacher) and teacher.path is None else FROZEN,
                num_entries=wanted,
                below=sizes[0] if _vocabulary(models[name].path) > sizes[0] else 0,
                prompts=prompts,
                timeout_s=engine.timeout_s,
                retries=engine.retries,
            ),
        )
    return orders


def _model_of(teacher: ServedTeacher, config: RunConfig) -> ModelConfig:
    """What its engine loads."""
    if teacher.path is None:
        return config.model.of_policy()
    if isinstance(teacher, FrozenTeacher) and config.model.lora is not None:
        from headrace.models.lora import config_of

        with called("learner.teachers: path"):
            return config.model.model_copy(update={"lora": config_of(Path(teacher.path))})
    return config.model.model_copy(update={"path": teacher.path, "lora": None})


def _vocabulary(path: str) -> int:
    """How many entries the distribution of a model has."""
    size: int = read_config(path).vocab_size
    return size


def _refuse_model(config: RunConfig, teacher: ServedTeacher, path: str, setting: str, context: int) -> None:
    if teacher.path is None or path == config.model.path:
        return
    with called(f"{setting} path"):
        refuse_other_vocabulary(path, config.model.path, f"{setting} path")
        most = context_length(path)
    if most < context:
        raise ConfigError(
            f"{setting} path={path!r} was made for {most} tokens, and it may be asked about {context}",
            remedy=f"choose a model for >= {context} tokens, set engine.max_context <= {most}, or shorten its prompt",
        )


def _refuse_unnamed(tasks: Sequence[Task], column: str, names: Sequence[str]) -> None:
    for task in tasks:
        named = task.row.get(column)
        if named not in names:
            said = "has no column" if column not in task.row else f"says {named!r} in column"
            raise DataError(
                f"row {task.row_index + 1} {said} {column!r}, which names the teacher of each row",
                remedy=f"{nearest(str(named), names)}; learner.teacher_column says which column it is",
            )


def _prompts(
    config: RunConfig, engine: OwnEngine, tasks: Sequence[Task], tokenizer: PromptTokenizer, setting: str
) -> list[IntColumn]:
    """What the teacher reads in the place of each row's prompt."""
    if config.env.remote:
        raise ConfigError(
            f"{setting} engine.prompt stands for the row's prompt, and with env.kind={config.env.kind!r} the "
            "environment asks in its own words",
            remedy="leave engine.prompt out, or set env.kind = 'single_turn'",
        )
    column = config.data.prompt_column
    rows = [{**task.row, column: _filled(engine.prompt, task, setting)} for task in tasks]
    written = make_tasks(rows, column, tokenizer, source=f"{setting} engine.prompt")
    return [np.asarray(task.prompt_ids_T) for task in written]


def _filled(template: str, task: Task, setting: str) -> str | list[dict[str, Any]]:
    if isinstance(task.prompt, str):
        return _text(template, task.row, task.prompt, task, setting)
    *before, last = task.prompt
    if not isinstance(last["content"], str):
        raise DataError(
            f"{setting} engine.prompt: the last message of row {task.row_index + 1} is a "
            f"{type(last['content']).__name__}, in whose place no text can stand",
            remedy="give the content of messages as text",
        )
    return [*before, {**last, "content": _text(template, task.row, last["content"], task, setting)}]


def _text(template: str, row: Row, prompt: str, task: Task, setting: str) -> str:
    try:
        return template.format_map({**row, "prompt": prompt})
    except KeyError as missing:
        raise DataError(
            f"{setting} engine.prompt asks for the column {missing}, which row {task.row_index + 1} has not",
            remedy="add it to every row, or leave it out of the prompt",
        ) from None
