"""What a scoring worker receives."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.tokens import IntColumn


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run is, as a reward function may ask for it: the argument ``trainer_state``, with the names and the
    meanings of ``transformers.TrainerState``."""

    global_step: int = 0
    """The optimizer steps behind the weights under which the group was begun."""
    max_steps: int = 0
    """The optimizer steps of the whole run: ``run.steps``."""
    epoch: float = 0.0
    """How often ``global_step`` steps go through the rows."""
    num_train_epochs: int = 0
    """How often the whole run goes through the rows, rounded up."""
    save_steps: int = 0
    """``run.checkpoint_every``."""
    eval_steps: int = 0
    """``run.eval_every``; 0: none."""
    logging_steps: int = 1
    """Every step is written to ``metrics.jsonl``."""
    is_world_process_zero: bool = True
    """A reward is computed once."""
    is_local_process_zero: bool = True
    """The same."""

    def __getattr__(self, name: str) -> Any:
        """Say what is known, for an attribute that is not."""
        known = ", ".join(self.__struct_fields__)
        raise AttributeError(f"trainer_state has no {name!r} here; it has {known}")


class ScoreCompletions(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Completions to score against one row: one, or all of a group for a reward function over lists."""

    call: int
    prompt: Any
    """The prompt as the row holds it: a string or a list of chat messages."""
    completions: tuple[str, ...]
    row: dict[str, Any]
    """The row of the dataset, prompt included."""
    history: str = ""
    """Everything that the model had read before a turn that is scored by itself."""
    turn: int = -1
    """Which turn of its episode that is, from 0; −1: the completions are whole."""
    completion_ids: tuple[IntColumn, ...] = ()
    """The tokens of each completion as they were sampled, a stop token included; only where the reward asks for
    them."""
    trainer: TrainerState = TrainerState()
    """Where the run is; only where the reward asks for it."""


Message = ScoreCompletions | Shutdown
