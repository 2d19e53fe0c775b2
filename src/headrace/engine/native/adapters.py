"""The LoRA adapters of an engine: which one computes a request, and how a step computes rows of several adapters.

A *row* is the place of one sequence in the batch; a *pass* is one forward pass of the model. An adapter has a name,
which requests give (an agent's name), and an index, which rows carry.

A model whose adapters are modules (peft) can compute one of them at a time, so that a step makes a pass for each. Other
adapters can share a pass, come and go while the engine runs, and have versions of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from headrace.models.lora import Switch

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """The rows of one forward pass. Shape suffix: R rows of the pass."""

    adapter_R: Index
    """The index of the adapter that computes each row."""
    counts_R: Index
    """The number of tokens of each row in the pass, one row after the other."""
    num_logits_R: Index
    """The number of each row's last tokens whose logits are computed; 0 for a row whose context is not complete."""


class EngineAdapters(Protocol):
    """The adapters among which the requests of an engine choose, as the engine uses them. All methods may be called
    between any two passes."""

    share_passes: bool
    """Whether rows of several adapters can be computed in one pass. If not, the engine makes a pass for each."""

    def names(self) -> Iterable[str]:
        """Return the names that a request may give; the empty name is the model without an adapter of a request's
        choice."""
        ...

    def find(self, name: str) -> int | None:
        """Return the index of the adapter ``name``, which no other adapter ever gets; ``None`` for an unknown name."""
        ...

    def on(self, rows: PassRows) -> AbstractContextManager[None]:
        """Return the context within which a pass over ``rows`` is computed with their adapters."""
        ...

    def versions(self, adapter_D: Index, version: int) -> int | Index:
        """Return the version that tokens carry which the adapters with the indices ``adapter_D`` have just sampled:
        one number for all, or one for each. ``version`` is that of the model."""
        ...


class SwitchedAdapters:
    """The adapters of a model whose adapters are modules (peft), so that it computes one of them at a time. All rows of
    a pass have the same adapter, and all adapters have the model's version."""

    share_passes = False

    def __init__(self, model: PreTrainedModel) -> None:
        """Use the adapters that ``model`` was loaded with."""
        self._switch = Switch(model)

    def names(self) -> Iterable[str]:
        """Return the names of the agents that have an adapter, the empty name of the policy among them."""
        return self._switch.agents

    def find(self, name: str) -> int | None:
        """Return the index of the adapter of the agent ``name``; ``None`` if it has none."""
        return self._switch.agents.index(name) if name in self._switch.agents else None

    def on(self, rows: PassRows) -> AbstractContextManager[None]:
        """Let the model compute with the adapter of the rows, which is the same for all of them, within this
        context."""
        return self._switch.on(self._switch.agents[rows.adapter_R[0]])

    def versions(self, adapter_D: Index, version: int) -> int | Index:
        """Return ``version``: all adapters have the version of the model."""
        return version
