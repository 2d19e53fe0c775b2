"""The loading of the kept-sets and experts of an episode. They are in the column store of the run, while the rest of
the episode is in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.base.errors import StoreError
from headrace.base.store import COLUMNS, StoreReader
from headrace.base.types.episode import EpisodeGraph, Turn

T = TypeVar("T")


def with_columns(episode: EpisodeGraph, run_dir: Path) -> EpisodeGraph:
    """Return a copy of an episode of the run in ``run_dir`` with its kept-sets and experts loaded into memory. A column
    that cannot be read, for example because ``flow.columns.keep`` was ``until_trained``, is left out as if it was not
    recorded."""
    reader = StoreReader(run_dir / COLUMNS)
    return replace(episode, turns=[_read(turn, reader) for turn in episode.turns])


def _read(turn: Turn, reader: StoreReader) -> Turn:
    """Return a copy of a turn with its columns loaded into memory."""
    kept, routing = turn.tokens.kept, turn.tokens.routing
    tokens = msgspec.structs.replace(
        turn.tokens, kept=_read_or_none(reader.kept, kept), routing=_read_or_none(reader.routing, routing)
    )
    return msgspec.structs.replace(
        turn, tokens=tokens, context_routing=_read_or_none(reader.routing, turn.context_routing)
    )


def _read_or_none(read: Callable[[T], T], column: T | None) -> T | None:
    """Return ``read(column)``; ``None`` if ``column`` is ``None`` or cannot be read."""
    try:
        return None if column is None else read(column)
    except StoreError:
        return None
