"""The tokens that end a text."""

from __future__ import annotations

import json
from pathlib import Path


def stop_ids(path: str, eos_id: int) -> tuple[int, ...]:
    """Return the ids of the stop tokens: the tokenizer's ``eos_id``, and those of ``generation_config.json`` in
    ``path``."""
    file = Path(path) / "generation_config.json"
    try:
        extra = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        extra = None
    ids = extra if isinstance(extra, list) else [extra]
    return tuple(dict.fromkeys([eos_id, *(token for token in ids if isinstance(token, int))]))
