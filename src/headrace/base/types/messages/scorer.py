"""The messages that a scoring worker receives: a process that runs reward functions. ``call`` is the number of an
order, which its answer repeats."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.tokens import IntColumn


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the run for a reward function that has an argument ``trainer_state``, with the names and the
    meanings of ``transformers.TrainerState``."""

    global_step: int = 0
    """The number of optimizer steps that made the weights under which the group was begun."""
    max_steps: int = 0
    """The optimizer steps of the whole run: ``run.steps``."""
    epoch: float = 0.0
    """``global_step`` as a number of passes over the rows."""
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
    """The order to score completions of one row: at once by a reward function that takes lists, else one by one."""

    call: int
    prompt: Any
    """The prompt as the row holds it: a string or a list of chat messages."""
    completions: tuple[str, ...]
    """The texts to score."""
    row: dict[str, Any]
    """The row of the dataset, prompt included."""
    history: str = ""
    """The text that the model had read before the turn, if a single turn is scored."""
    turn: int = -1
    """The index of the scored turn in its episode, from 0; −1 if whole completions are scored."""
    completion_ids: tuple[IntColumn, ...] = ()
    """The sampled tokens of each completion, a stop token included; empty unless the reward function uses them."""
    trainer: TrainerState = TrainerState()
    """The state of the run; the default unless the reward function uses it."""

    def single(self, index: int) -> ScoreCompletions:
        """Return the order to score only the completion at ``index``."""
        at = slice(index, index + 1)
        return msgspec.structs.replace(
            self, completions=self.completions[at], completion_ids=self.completion_ids[at]
        )  # fmt: skip


Message = ScoreCompletions | Shutdown
