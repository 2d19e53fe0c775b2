"""Copies of the weights that are trained, which the model computes with for a while.

    kind         after an update that makes version v                    lent for the batch of version v
    frozen       nothing                                                 the first weights, or those of a directory
    ema          w̄ ← decay·w̄ + (1 − decay)·w   (float32)                w̄, in the model's number format
    refreshed    if v is a multiple of ``every``: copy                   the last copy
    lagged       (before it: the weights of v − 1 replace the oldest)    those of v − ``versions``

A copy holds this rank's parts of the parameters that require gradients: of a model with an adapter only that, so that a
frozen copy is the base model at the price of an adapter. Lending exchanges contents in place, tensor by tensor, so it
does not matter who else points at a parameter: another name it is tied to, torch's sharding, the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.learner.companions.config import Ema, Frozen, KeptConfig, Lagged, Refreshed
from headrace.learner.parallel.halves import reshard
from headrace.learner.parallel.optim import TrainedWeight
from headrace.learner.parallel.shards import like, local, part_of

Named = Iterator[tuple[str, Tensor]]


class Copy:
    """One copy of the weights in ``trained``."""

    def __init__(
        self, model: nn.Module, trained: Sequence[TrainedWeight], device: str, dtype: torch.dtype | None = None
    ):
        self._model = model
        self._trained = trained
        where = None if device == "model" else torch.device(device)
        self._parts = [
            local(one.weight.detach()).to(device=where, dtype=dtype, copy=True) for one in trained
        ]  # fmt: skip

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present weights."""
        for one, part in zip(self._trained, self._parts, strict=True):
            part.copy_(local(one.weight.detach()))

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """Go a step towards the present weights, as the optimizer holds them: in float32, where it does."""
        for one, part in zip(self._trained, self._parts, strict=True):
            part.lerp_(one.home.detach().to(part.device, part.dtype), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange it with the present weights."""
        for one, part in zip(self._trained, self._parts, strict=True):
            _exchange(local(one.weight.detach()), part)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the model computes with this copy, without gradients; the weights are untouched afterwards."""
        pairs = [(local(one.weight.detach()), part) for one, part in zip(self._trained, self._parts, strict=True)]
        waiting: list[Tensor] = []
        with torch.no_grad():
            reshard(self._model)
            try:
                waiting.extend(_lend(*pair) for pair in pairs)
                yield
            finally:
                reshard(self._model)
                for pair, held in zip(pairs[: len(waiting)], waiting, strict=True):
                    _give_back(*pair, held)

    def state(self) -> Named:
        """Its tensors by the names of the parameters, lying on the ranks as those do."""
        for one, part in zip(self._trained, self._parts, strict=True):
            yield one.name, like(part.to(local(one.weight).device), one.weight)

    @torch.no_grad()
    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over whole tensors. Raises ``KeyError`` for one that is missing, ``ValueError`` for another shape."""
        for one, part in zip(self._trained, self._parts, strict=True):
            full = state[one.name]
            if full.shape != one.weight.shape:
                raise ValueError(f"{one.name} is {list(full.shape)}, expected {list(one.weight.shape)}")
            part.copy_(part_of(full, one.weight))


def _lend(weight: Tensor, part: Tensor) -> Tensor:
    """Put ``part`` into ``weight``; where that one's own numbers wait. In ``part``, if it can hold them exactly and
    lose nothing of its own."""
    if part.dtype == weight.dtype:
        _exchange(weight, part)
        return part
    own = weight.clone()
    weight.copy_(part)
    return own


def _give_back(weight: Tensor, part: Tensor, waiting: Tensor) -> None:
    if waiting is part:
        _exchange(weight, part)
    else:
        weight.copy_(waiting)


def _exchange(one: Tensor, other: Tensor) -> None:
    held = one.clone()
    one.copy_(other)
    other.copy_(held)


class KeptWeights(Protocol):
    """Which copy is lent, and what an update does to it."""

    keeps: bool
    """Whether a snapshot has to hold it: not if it comes from a directory each time."""

    def lent(self) -> AbstractContextManager[None]:
        """See :meth:`Copy.lent`."""
        ...

    def before_update(self) -> None:
        """The weights are still those of the version before."""
        ...

    def after_update(self, version: int) -> None:
        """The weights are those of ``version``."""
        ...

    def state(self) -> Named:
        """What a snapshot holds of it."""
        ...

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with it."""
        ...


class OneCopy:
    """A copy that updates do not change."""

    def __init__(self, copy: Copy, *, keeps: bool = True) -> None:
        self._copy = copy
        self.keeps = keeps

    def lent(self) -> AbstractContextManager[None]:
        return self._copy.lent()

    def before_update(self) -> None:
        return

    def after_update(self, version: int) -> None:
        return

    def state(self) -> Named:
        return self._copy.state()

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        self._copy.set_state(state)


class Averaged(OneCopy):
    """A copy that follows the weights."""

    def __init__(self, copy: Copy, decay: float) -> None:
        super().__init__(copy)
        self._decay = decay

    def after_update(self, version: int) -> None:
        self._copy.blend(self._decay)


class Renewed(OneCopy):
    """A copy that is made again now and then."""

    def __init__(self, copy: Copy, every: int) -> None:
        super().__init__(copy)
        self._every = every

    def after_update(self, version: int) -> None:
        if version % self._every == 0:
            self._copy.take()


class Ring:
    """The last versions, the oldest first."""

    keeps = True

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._spare = list(copies)
        self._ring: deque[Copy] = deque(maxlen=len(copies))

    def lent(self) -> AbstractContextManager[None]:
        return self._ring[0].lent() if self._ring else nullcontext()  # of version 0: the weights themselves

    def before_update(self) -> None:
        copy = self._spare.pop() if self._spare else self._ring.popleft()
        copy.take()
        self._ring.append(copy)

    def after_update(self, version: int) -> None:
        return

    def state(self) -> Named:
        for place, copy in enumerate(self._ring):
            for name, tensor in copy.state():
                yield f"{place}|{name}", tensor

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        self._spare += self._ring
        self._ring.clear()
        places = len({label.partition("|")[0] for label in state})
        if places > len(self._spare):
            raise ValueError(f"it holds {places} versions, and {len(self._spare)} are kept")
        for place in range(places):
            prefix = f"{place}|"
            named = {label.removeprefix(prefix): tensor for label, tensor in state.items() if label.startswith(prefix)}
            copy = self._spare.pop()
            copy.set_state(named)
            self._ring.append(copy)


def keep(config: KeptConfig, model: nn.Module, trained: Sequence[TrainedWeight]) -> KeptWeights:
    """Of the present weights."""

    def copy(dtype: torch.dtype | None = None) -> Copy:
        return Copy(model, trained, config.device, dtype)

    match config:
        case Frozen():
            return OneCopy(copy(), keeps=config.path is None)
        case Ema():
            return Averaged(copy(torch.float32), config.decay)
        case Refreshed():
            return Renewed(copy(), config.every)
        case Lagged():
            return Ring([copy() for _ in range(config.versions)])
