"""The conversion of dataset rows to tasks, with the prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.base.errors import DataError
from headrace.base.types.task import Prompt, Task
from headrace.rollout.environments.data import Row
from headrace.rollout.rendering import Tokenizer

_ROLES = ("system", "user", "assistant", "tool", "developer")
"""The roles that a message of a prompt may have."""


def make_tasks(
    rows: Sequence[Row], column: str, tokenizer: Tokenizer, *, source: str, optional: bool = False
) -> list[Task]:
    """Return one task for each of ``rows``, with the prompt from ``column``. Raises :class:`DataError` with the problem
    and the row: ``source``, such as the name of the file, and the number of the row, counted from 1. If prompts are
    ``optional``, a row without a prompt becomes a task without a prompt, and the environment creates the prompt."""
    return [
        Task(row_index=index, row=row, prompt="", prompt_ids_T=np.zeros(0, np.int32))
        if optional and column not in row
        else _make_task(index, row, column, tokenizer, row_name=f"{source}, row {index + 1}")
        for index, row in enumerate(rows)
    ]


def _make_task(index: int, row: Row, column: str, tokenizer: Tokenizer, *, row_name: str) -> Task:
    """Return the task of ``row``, which has the index ``index``, with the prompt in ``column`` as token ids.
    ``row_name`` names the row in errors."""
    if column not in row:
        raise DataError(
            f"{row_name}: no column {column!r} (it has: {', '.join(map(str, row))})",
            remedy="name the prompt's column in data.prompt_column",
        )
    prompt = _check_prompt(row[column], row_name)
    try:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else _encode_chat(prompt, tokenizer, row_name)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - templates are code of the model directory, and tokenizers refuse in many ways
        details = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{row_name}: tokenizer or chat template refuses the prompt {str(prompt)[:80]!r}: {details}",
            remedy="fix that prompt, or the chat template of the model directory",
        ) from None
    if not ids:
        raise DataError(f"{row_name}: the prompt is empty", remedy="give every row a prompt of at least one token")
    return Task(row_index=index, row=row, prompt=prompt, prompt_ids_T=np.asarray(ids, np.int32))


def _check_prompt(prompt: Any, row_name: str) -> Prompt:
    """Return ``prompt`` if it is text or a list of chat messages. Raises :class:`~headrace.base.errors.DataError`
    otherwise, with ``row_name``."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        for message in prompt:
            if message.get("role") not in _ROLES or "content" not in message:
                raise DataError(
                    f"{row_name}: a message without a known role and content: {str(message)[:80]}",
                    remedy='write messages as {"role": "user", "content": "..."}',
                )
        return prompt
    raise DataError(
        f"{row_name}: the prompt is a {type(prompt).__name__}", remedy="give text, or a list of chat messages"
    )


def _encode_chat(messages: list[dict[str, Any]], tokenizer: Tokenizer, row_name: str) -> list[int]:
    """Return the token ids of chat messages, rendered by the model's template, with the beginning of an answer.
    ``row_name`` names their row in errors."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{row_name}: chat messages, but the model's tokenizer has no chat template",
            remedy="use a chat model, add a chat_template.jinja to the model directory, or give plain text prompts",
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
