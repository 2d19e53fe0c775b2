"""Settings of data and environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section
from headrace.env.curriculum import CurriculumConfig


class DataConfig(Section):
    """Where the tasks come from: one row is one task."""

    path: str = ""
    """A ``.jsonl``, ``.csv`` or ``.parquet`` file; its columns are what the reward sees. Empty where rows are handed
    over in Python."""
    eval_path: str = ""
    """Held-out rows in the same form; empty: no evaluation."""
    prompt_column: str = "prompt"
    """The column with the prompt: text, or a list of chat messages."""
    shuffle: bool = True
    """Visit the rows in a new random order in every epoch."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows, in groups attempted: when they are used up, the run ends with what it has learned. Unset:
    the rows are visited again as often as the steps need, dropped groups included."""
    curriculum: CurriculumConfig | None = None
    """Attempt rows by how often they are solved, instead of each once per epoch; unset: no curriculum."""


class EnvConfig(Section):
    """What an attempt is, and how it is rewarded."""

    kind: Literal["single_turn"] = "single_turn"
    """The model reads the prompt and answers once."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """An attempt that has not ended this long after it began, its waits for the engine included, costs its own episode
    (``env_timeout``)."""
    reward: str = ""
    """``file.py:function``: ``reward(completion, **row) -> float | None``, sync or async; or, over a whole group,
    ``reward(prompts, completions, **columns) -> list``. Empty where a function is handed over in Python."""
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """A call that has not returned this long after it began costs its own episode, and its worker is replaced. Calls
    that wait their turn do not count."""
    reward_workers: int = Field(default=1, ge=1)
    """Processes that call the reward function."""
    reward_concurrency: int = Field(default=256, ge=1)
    """Calls at once in each worker. Of a sync function at most 16 run at once, in threads that share one interpreter:
    for more, write it ``async`` where it waits, or raise ``reward_workers`` where it computes."""
