"""Which tokens end a text."""

from __future__ import annotations

import json
from pathlib import Path


def stop_ids(path: str, eos_id: int) -> tuple[int, ...]:
    """The tokenizer's end of sequence, and what the generation settings of the model directory ``path`` add to it."""
    file = Path(path) / "generation_config.json"
    try:
        extra = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        extra = None
    ids = extra if isinstance(extra, list) else [extra]
    return tuple(dict.fromkeys([eos_id, *(token for token in ids if isinstance(token, int))]))
