"""Copies of the trained weights that the model can be switched to for a while.

    kind         at an update that makes version v                       used for the batch of version v
    frozen       nothing                                                 the first weights, or those of a directory
    ema          w̄ ← decay·w̄ + (1 − decay)·w   (float32)                w̄, in the model's number format
    refreshed    if v is a multiple of ``every``: copy                   the last copy
    lagged       (before it: the weights of v − 1 replace the oldest)    those of v − ``versions``

A copy holds this rank's parts of the parameters that require gradients, and the correction biases of routers. For a
model with an adapter these are the adapter's, so a frozen copy stands for the base model at the price of an adapter.
Swapping exchanges the contents in place, tensor by tensor, so that other references to a parameter stay valid: tied
names, torch's sharding, the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.learner.auxiliary.config import Ema, Frozen, KeptConfig, Lagged, Refreshed
from headrace.learner.parallel.optim import TrainedWeight
from headrace.learner.parallel.parts import SavedTensor
from headrace.learner.parallel.shards import like, local, part_of
from headrace.learner.parallel.split import reshard
from headrace.models.weights import CORRECTION_BIAS, correction_biases

Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor of the model of which a :class:`Copy` is kept."""

    name: str
    """Name of the parameter or buffer in the model."""
    weight: Tensor
    """The tensor in the model."""
    master: Tensor
    """The tensor that an update changes: the weight itself, or the optimizer's float32 numbers of it."""


class Copy:
    """A copy of the parameters in ``trained``, and of the biases of a mixture's routers, which an update may move."""

    def __init__(
        self, model: nn.Module, trained: Sequence[TrainedWeight], device: str, dtype: torch.dtype | None = None
    ):
        """Copy the current weights to ``device``, where ``"model"`` means the device of each weight, in ``dtype``;
        ``None``: in the dtype of each weight."""
        self._model = model
        biases = correction_biases(model)
        self._sources = [CopiedTensor(one.name, one.weight, one.master) for one in trained]
        self._sources += [CopiedTensor(name, bias, bias) for name, bias in biases.items()]
        where = None if device == "model" else torch.device(device)
        self._parts = [
            local(one.weight.detach()).to(device=where, dtype=dtype, copy=True) for one in self._sources
        ]  # fmt: skip

    @torch.no_grad()
    def take(self) -> None:
        """Copy the current weights into this copy, in its own dtype and on its own device."""
        for one, part in zip(self._sources, self._parts, strict=True):
            part.copy_(local(one.weight.detach()))

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """Move the copy towards the current weights as an exponential moving average: copy ← ``decay`` · copy + (1 −
        ``decay``) · weights. It reads the optimizer's float32 weights where they exist."""
        for one, part in zip(self._sources, self._parts, strict=True):
            part.lerp_(one.master.detach().to(part.device, part.dtype), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the copy and of the current weights, tensor by tensor and in place."""
        for one, part in zip(self._sources, self._parts, strict=True):
            _exchange(local(one.weight.detach()), part)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model compute with this copy, without gradients, inside the ``with`` block; the weights are unchanged
        afterwards."""
        pairs = [(local(one.weight.detach()), part) for one, part in zip(self._sources, self._parts, strict=True)]
        own: list[Tensor] = []
        with torch.no_grad():
            reshard(self._model)
            try:
                own.extend(_put_in(*pair) for pair in pairs)
                yield
            finally:
                reshard(self._model)
                for pair, held in zip(pairs[: len(own)], own, strict=True):
                    _put_back(*pair, held)

    def state(self) -> Named:
        """Yield the tensors of the copy by parameter name, sharded over the ranks like the parameters."""
        for one, part in zip(self._sources, self._parts, strict=True):
            yield one.name, like(part.to(local(one.weight).device), one.weight)

    @torch.no_grad()
    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Copy this rank's parts of whole or saved tensors into this copy. Raises ``KeyError`` for a missing tensor and
        ``ValueError`` for another shape."""
        for one, part in zip(self._sources, self._parts, strict=True):
            if one.name.endswith(CORRECTION_BIAS) and one.name not in state:
                continue  # a snapshot from before biases were moved: they keep the values that were loaded
            full = state[one.name]
            if full.shape != one.weight.shape:
                raise ValueError(f"{one.name} is {list(full.shape)}, expected {list(one.weight.shape)}")
            part.copy_(part_of(full, one.weight))


def _put_in(weight: Tensor, part: Tensor) -> Tensor:
    """Write ``part`` into ``weight``, and return the tensor that keeps the weight's own values until
    :func:`_put_back`. This is ``part`` itself if both have the same dtype: the two exchange their contents, so that
    nothing is rounded and no memory is needed."""
    if part.dtype == weight.dtype:
        _exchange(weight, part)
        return part
    own = weight.clone()
    weight.copy_(part)
    return own


def _put_back(weight: Tensor, part: Tensor, own: Tensor) -> None:
    """Restore the values of ``weight`` that :func:`_put_in` kept in the tensor ``own``, which it returned for the same
    ``weight`` and ``part``."""
    if own is part:
        _exchange(weight, part)
    else:
        weight.copy_(own)


def _exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the values of two tensors of the same shape in place, with the memory of one more such tensor
    meanwhile."""
    held = one.clone()
    one.copy_(other)
    other.copy_(held)


class KeptWeights(Protocol):
    """The rule that decides which copy of the trained weights is used, and how an update changes the copies. Its owner,
    an auxiliary model, calls it around every update."""

    has_state: bool
    """Whether a snapshot must contain the copies; not if they come from a directory each time."""

    def swapped_in(self) -> AbstractContextManager[None]:
        """Let the model compute with the copy; see :meth:`Copy.swapped_in`."""
        ...

    def before_update(self) -> None:
        """Prepare for an update: the weights are still those of the version before."""
        ...

    def after_update(self, version: int) -> None:
        """Follow an update: the weights are now those of ``version``."""
        ...

    def state(self) -> Named:
        """Yield the tensors that a snapshot contains, with their names."""
        ...

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the tensors that :meth:`state` yielded."""
        ...


class OneCopy:
    """Kept weights that consist of one copy which no update changes; the base class of copies that updates do
    change."""

    def __init__(self, copy: Copy, *, has_state: bool = True) -> None:
        """Keep ``copy``. ``has_state`` says whether a snapshot must contain it; not if it comes from a directory each
        time."""
        self._copy = copy
        self.has_state = has_state

    def swapped_in(self) -> AbstractContextManager[None]:
        """Let the model compute with the copy inside the ``with`` block; see :meth:`Copy.swapped_in`."""
        return self._copy.swapped_in()

    def before_update(self) -> None:
        """Do nothing: the copy does not depend on the weights before an update."""
        return

    def after_update(self, version: int) -> None:
        """Do nothing: an update does not change the copy."""
        return

    def state(self) -> Named:
        """Yield the tensors of the copy by parameter name, for a snapshot."""
        return self._copy.state()

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the tensors that :meth:`state` yielded, given as whole tensors."""
        self._copy.set_state(state)


class Averaged(OneCopy):
    """Kept weights that are an exponential moving average of the trained weights, updated after every update."""

    def __init__(self, copy: Copy, decay: float) -> None:
        """Keep the average in ``copy``; ``decay`` is the factor by which each update multiplies it."""
        super().__init__(copy)
        self._decay = decay

    def after_update(self, version: int) -> None:
        """Move the average towards the new weights."""
        self._copy.blend(self._decay)


class Renewed(OneCopy):
    """Kept weights that are copied again from the trained weights at every version that is a multiple of ``every``."""

    def __init__(self, copy: Copy, every: int) -> None:
        """Keep the weights of the last version that ``every`` divides in ``copy``."""
        super().__init__(copy)
        self._every = every

    def after_update(self, version: int) -> None:
        """Copy the new weights if ``version`` is a multiple of ``every``."""
        if version % self._every == 0:
            self._copy.take()


class Ring:
    """Kept weights of the last versions: a queue of at most ``len(copies)`` copies, the oldest first. It is empty at
    version 0 and grows by one copy at each update until it is full."""

    has_state = True

    def __init__(self, copies: Sequence[Copy]) -> None:
        """Keep as many versions as there are ``copies``, whose memory is used one after the other; their contents do
        not count yet."""
        self._spare = list(copies)
        self._ring: deque[Copy] = deque(maxlen=len(copies))

    def swapped_in(self) -> AbstractContextManager[None]:
        """Let the model compute with the oldest copy inside the ``with`` block; at version 0, when there is no copy
        yet, with its own weights."""
        return self._ring[0].swapped_in() if self._ring else nullcontext()  # at version 0: the weights themselves

    def __len__(self) -> int:
        """Return how many versions have a copy at present."""
        return len(self._ring)

    def swapped_in_from(self, age: int) -> AbstractContextManager[None]:
        """Let the model compute with the weights of ``age`` versions ago inside the ``with`` block. ``age`` is between
        1 and ``len(self)``."""
        return self._ring[-age].swapped_in()

    def before_update(self) -> None:
        """Save the present weights as the newest copy, in the memory of the oldest once all copies are taken."""
        copy = self._spare.pop() if self._spare else self._ring.popleft()
        copy.take()
        self._ring.append(copy)

    def after_update(self, version: int) -> None:
        """Do nothing: :meth:`before_update` has made the copy."""
        return

    def state(self) -> Named:
        """Yield the tensors of all copies for a snapshot, each labelled ``place|name``; place 0 is the oldest copy."""
        for place, copy in enumerate(self._ring):
            for name, tensor in copy.state():
                yield f"{place}|{name}", tensor

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the kept versions from the tensors of a snapshot, which are labelled ``place|name``. Raises
        ``ValueError`` if there are too many."""
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
    """Return the kept weights that ``config`` describes, with copies of the current weights. ``trained`` are the
    trained weights of ``model``."""

    def copy(dtype: torch.dtype | None = None) -> Copy:
        return Copy(model, trained, config.device, dtype)

    match config:
        case Frozen():
            return OneCopy(copy(), has_state=config.path is None)
        case Ema():
            return Averaged(copy(torch.float32), config.decay)
        case Refreshed():
            return Renewed(copy(), config.every)
        case Lagged():
            return Ring([copy() for _ in range(config.versions)])
