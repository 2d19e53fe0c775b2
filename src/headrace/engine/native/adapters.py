"""The LoRA adapters of an engine: the choice of the adapter that computes a request, and steps with rows of several
adapters.

A *row* is the place of one sequence in the batch; a *pass* is one forward pass of the model. An adapter has a name,
which a request contains (the name of an agent), and an index, which is stored for each row.

A model whose adapters are modules (peft) computes one adapter at a time, so a step makes one pass for each adapter.
Other implementations can share a pass, add and remove adapters while the engine runs, and have a version for each
adapter.
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
    """The number of tokens of each row in the pass. The tokens of a row are contiguous, in the order of the rows."""
    num_logits_R: Index
    """The number of tokens at the end of each row whose logits are computed; 0 for a row whose context is
    incomplete."""


class EngineAdapters(Protocol):
    """The adapters that the requests of an engine can choose. The engine may call every method between any two
    passes."""

    share_passes: bool
    """Whether rows of several adapters can be computed in one pass. If not, the engine makes one pass for each
    adapter."""

    def names(self) -> Iterable[str]:
        """Return the adapter names that a request may contain. The empty name stands for the model's default, without a
        choice of the request."""
        ...

    def find(self, name: str) -> int | None:
        """Return the index of the adapter ``name``; ``None`` for an unknown name. An index is never used again for
        another adapter."""
        ...

    def on(self, rows: PassRows) -> AbstractContextManager[None]:
        """Return the context within which a pass over ``rows`` is computed with their adapters."""
        ...

    def versions(self, adapter_D: Index, version: int) -> int | Index:
        """Return the version of the tokens that the adapters with the indices ``adapter_D`` have just sampled: one
        number for all rows, or one for each row. ``version`` is the version of the model."""
        ...


class SwitchedAdapters:
    """The adapters of a model that has them as modules (peft) and computes one of them at a time. All rows of a pass
    have the same adapter, and all adapters have the model's version."""

    share_passes = False

    def __init__(self, model: PreTrainedModel) -> None:
        """Use the adapters that ``model`` was loaded with."""
        self._switch = Switch(model)
        """The switch that selects the adapter with which the model computes."""

    def names(self) -> Iterable[str]:
        """Return the names of the agents that have an adapter, including the empty name, which is the policy's."""
        return self._switch.agents

    def find(self, name: str) -> int | None:
        """Return the index of the adapter of the agent ``name``; ``None`` if the agent has no adapter."""
        return self._switch.agents.index(name) if name in self._switch.agents else None

    def on(self, rows: PassRows) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the adapter of ``rows``, which is the same for all of
        them."""
        return self._switch.on(self._switch.agents[rows.adapter_R[0]])

    def versions(self, adapter_D: Index, version: int) -> int | Index:
        """Return ``version``: all adapters have the version of the model."""
        return version
