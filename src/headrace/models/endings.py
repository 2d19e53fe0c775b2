"""The stop tokens of a model, which end an answer."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.base.errors import ModelError
from headrace.models.settings import read_config


def stop_ids(path: str, eos_id: int) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer: the tokenizer's ``eos_id``, and those of
    ``generation_config.json`` in the model directory ``path``. Ids outside the model's vocabulary are left out, since
    no answer can contain them.

    Raises :class:`~headrace.base.errors.ModelError` if there is no such token.
    """
    file = Path(path) / "generation_config.json"
    try:
        extra = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        extra = None
    named = [eos_id, *(extra if isinstance(extra, list) else [extra])]
    ids = tuple(dict.fromkeys(token for token in named if isinstance(token, int)))
    size: int = read_config(path).vocab_size
    found = tuple(token for token in ids if 0 <= token < size)
    if not found:
        raise ModelError(
            f"no answer of model.path={path!r} could end: the end-of-sequence token of its tokenizer and of "
            f"generation_config.json ({', '.join(map(str, ids))}) is outside its vocabulary of {size}",
            remedy="set eos_token_id in generation_config.json to a token of the model, or copy the tokenizer that "
            "belongs to it",
        )
    return found
