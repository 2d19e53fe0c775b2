"""The messages that a scoring worker receives. A scoring worker is a process that executes reward functions. ``call``
is the number of an order; the worker's answer repeats it."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.tokens import IntColumn


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the run that a reward function with a parameter ``trainer_state`` receives. Names and meanings are
    those of ``transformers.TrainerState``."""

    global_step: int = 0
    """The number of optimizer steps after which the group was started; also the version of the weights at that time."""
    max_steps: int = 0
    """The number of optimizer steps of the whole run: ``run.steps``."""
    epoch: float = 0.0
    """The number of passes over the rows that correspond to ``global_step``."""
    num_train_epochs: int = 0
    """The number of passes over the rows in the whole run, rounded up."""
    save_steps: int = 0
    """The setting ``run.checkpoint_every``."""
    eval_steps: int = 0
    """The setting ``run.eval_every``; 0: no evaluation."""
    logging_steps: int = 1
    """Always 1: every step is written to ``metrics.jsonl``."""
    is_world_process_zero: bool = True
    """Always true: a reward is computed once."""
    is_local_process_zero: bool = True
    """Always true: a reward is computed once."""

    def __getattr__(self, name: str) -> Any:
        """Raise ``AttributeError`` with the list of known attributes. Python calls this only for an attribute that does
        not exist."""
        known = ", ".join(self.__struct_fields__)
        raise AttributeError(f"trainer_state has no {name!r} here; it has {known}")


class ScoreCompletions(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to score completions of one row in one call: one completion, or all completions of a group if the
    reward function accepts lists."""

    call: int
    prompt: Any
    """The prompt of the row: a string or a list of chat messages."""
    completions: tuple[str, ...]
    """The texts to score."""
    row: dict[str, Any]
    """The row of the dataset, prompt included."""
    history: str = ""
    """The text that precedes the turn, if a single turn is scored; otherwise empty."""
    turn: int = -1
    """The index of the scored turn in its episode, from 0; −1 if whole completions are scored."""
    completion_ids: tuple[IntColumn, ...] = ()
    """The sampled tokens of each completion, a stop token included; empty unless the reward function uses them."""
    trainer: TrainerState = TrainerState()
    """The state of the run; the default if the reward function does not use it."""

    def make_single_order(self, index: int) -> ScoreCompletions:
        """Return the order to score only the completion at ``index``."""
        at = slice(index, index + 1)
        return msgspec.structs.replace(
            self, completions=self.completions[at], completion_ids=self.completion_ids[at]
        )  # fmt: skip


class ScoreTogether(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to score the completions of several rows one by one, by a reward function whose calls are short. The
    time limit holds for all of them together."""

    call: int
    requests: tuple[ScoreCompletions, ...]
    """The completions of each row. The calls of these requests are not used."""


Message = ScoreCompletions | ScoreTogether | Shutdown
