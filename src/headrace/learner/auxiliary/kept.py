"""Kept copies of the trained weights, with which the model can compute for a while, and the rules by which updates
change them.

    kind         at the update to version v                              used for the batch of version v
    frozen       nothing                                                 the initial weights, or those of a directory
    ema          w̄ ← decay·w̄ + (1 − decay)·w   (float32)                w̄, in the model's dtype
    refreshed    if v is a multiple of ``every``: copy                   the last copy
    lagged       before it: the weights of v − 1 replace the oldest      the weights of v − ``versions``

A copy contains this rank's shards of the parameters that require gradients, and the correction biases of routers. For a
model with an adapter these are the adapter's parameters, so a frozen copy needs only the memory of an adapter. Swapping
exchanges the values of tensors in place, so that all references to a parameter stay valid (tied names, torch's
sharding, the optimizer).
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
from headrace.learner.parallel.shards import local_shard, slice_shard, wrap_shard
from headrace.learner.parallel.split import reshard
from headrace.models.weights import CORRECTION_BIAS, correction_biases

Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor of the model of which a :class:`Copy` is kept."""

    name: str
    """The name of the parameter or buffer in the model."""
    weight: Tensor
    """The tensor in the model."""
    master: Tensor
    """The tensor that an update changes: the weight itself, or the optimizer's float32 master weight of it."""


class Copy:
    """A copy of the parameters in ``trained`` and of the correction biases of a mixture's routers, which updates may
    change."""

    def __init__(
        self, model: nn.Module, trained: Sequence[TrainedWeight], device: str, dtype: torch.dtype | None = None
    ):
        """Copy the current weights of ``model`` to ``device``, where ``"model"`` means the device of each weight, in
        ``dtype``; ``None``: in the dtype of each weight. ``trained`` are the parameters that the optimizer updates."""
        self._model = model
        biases = correction_biases(model)
        self._sources = [CopiedTensor(one.name, one.weight, one.master) for one in trained]
        """The tensors that are copied."""
        self._sources += [CopiedTensor(name, bias, bias) for name, bias in biases.items()]
        where = None if device == "model" else torch.device(device)
        self._parts = [
            local_shard(one.weight.detach()).to(device=where, dtype=dtype, copy=True) for one in self._sources
        ]  # fmt: skip
        """This rank's shards of their copies, in the same order."""

    @torch.no_grad()
    def take(self) -> None:
        """Copy the current weights into this copy, in its own dtype and on its own device."""
        for one, part in zip(self._sources, self._parts, strict=True):
            part.copy_(local_shard(one.weight.detach()))

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """Update the copy as an exponential moving average of the current weights: copy ← ``decay`` · copy + (1 −
        ``decay``) · weights. The optimizer's float32 master weights are used, if there are any."""
        for one, part in zip(self._sources, self._parts, strict=True):
            part.lerp_(one.master.detach().to(part.device, part.dtype), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the copy and of the current weights, tensor by tensor and in place."""
        for one, part in zip(self._sources, self._parts, strict=True):
            _exchange(local_shard(one.weight.detach()), part)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Return a context in which the model computes with this copy, without gradients. Afterwards the weights have
        their old values."""
        pairs = [(local_shard(one.weight.detach()), part) for one, part in zip(self._sources, self._parts, strict=True)]
        saved_weights: list[Tensor] = []
        with torch.no_grad():
            reshard(self._model)
            try:
                saved_weights.extend(_write_copy(*pair) for pair in pairs)
                yield
            finally:
                reshard(self._model)
                for pair, saved in zip(pairs[: len(saved_weights)], saved_weights, strict=True):
                    _restore_weight(*pair, saved)

    def state(self) -> Named:
        """Yield the tensors of the copy by parameter name, sharded over the ranks like the parameters."""
        for one, part in zip(self._sources, self._parts, strict=True):
            yield one.name, wrap_shard(part.to(local_shard(one.weight).device), one.weight)

    @torch.no_grad()
    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Copy this rank's shards of the tensors in ``state``, by parameter name, into this copy. Raises ``KeyError``
        for a missing tensor and ``ValueError`` for a wrong shape."""
        for one, part in zip(self._sources, self._parts, strict=True):
            if one.name.endswith(CORRECTION_BIAS) and one.name not in state:
                continue  # older snapshots have no biases: keep the loaded values
            full = state[one.name]
            if full.shape != one.weight.shape:
                raise ValueError(f"{one.name} is {list(full.shape)}, expected {list(one.weight.shape)}")
            part.copy_(slice_shard(full, one.weight))


def _write_copy(weight: Tensor, part: Tensor) -> Tensor:
    """Write ``part`` into ``weight``, and return the tensor that stores the weight's values until
    :func:`_restore_weight`. If both have the same dtype this is ``part`` itself: they exchange their values, so nothing
    is rounded and no memory is needed."""
    if part.dtype == weight.dtype:
        _exchange(weight, part)
        return part
    saved_weights = weight.clone()
    weight.copy_(part)
    return saved_weights


def _restore_weight(weight: Tensor, part: Tensor, saved_weights: Tensor) -> None:
    """Restore the values of ``weight`` from ``saved_weights``, the tensor that :func:`_write_copy` returned for the
    same ``weight`` and ``part``."""
    if saved_weights is part:
        _exchange(weight, part)
    else:
        weight.copy_(saved_weights)


def _exchange(first: Tensor, second: Tensor) -> None:
    """Exchange the values of two tensors of the same shape in place; this needs temporary memory for one such
    tensor."""
    saved = first.clone()
    first.copy_(second)
    second.copy_(saved)


class KeptWeights(Protocol):
    """The contract of kept weights: copies of the trained weights, the choice of the copy that is used, and the changes
    at an update. An auxiliary model owns them and calls them before and after every update."""

    has_state: bool
    """Whether a snapshot must contain the copies; false if they are always loaded from a directory."""

    def swap_in(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the copy; see :meth:`Copy.swap_in`."""
        ...

    def before_update(self) -> None:
        """Called before an update: the model still has the weights of the previous version."""
        ...

    def after_update(self, version: int) -> None:
        """Called after an update: the model now has the weights of ``version``."""
        ...

    def state(self) -> Named:
        """Yield pairs of a name and a tensor for a snapshot."""
        ...

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the tensors that :meth:`state` yielded."""
        ...


class OneCopy:
    """Kept weights of a single copy that updates do not change. It is also the base class of single copies that updates
    change."""

    def __init__(self, copy: Copy, *, has_state: bool = True) -> None:
        """Use ``copy``. ``has_state`` says whether a snapshot must contain it; false if it is always loaded from a
        directory."""
        self._copy = copy
        self.has_state = has_state

    def swap_in(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the copy; see :meth:`Copy.swap_in`."""
        return self._copy.swap_in()

    def before_update(self) -> None:
        """Do nothing: the copy does not need the weights before an update."""
        return

    def after_update(self, version: int) -> None:
        """Do nothing: an update does not change the copy."""
        return

    def state(self) -> Named:
        """Yield the tensors of the copy by parameter name, for a snapshot."""
        return self._copy.state()

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the copy from the tensors that :meth:`state` yielded."""
        self._copy.set_state(state)


class Averaged(OneCopy):
    """Kept weights that are an exponential moving average of the trained weights, updated after every update."""

    def __init__(self, copy: Copy, decay: float) -> None:
        """Keep the average in ``copy``; ``decay`` is the factor by which each update multiplies it."""
        super().__init__(copy)
        self._decay = decay

    def after_update(self, version: int) -> None:
        """Update the average with the new weights."""
        self._copy.blend(self._decay)


class Renewed(OneCopy):
    """Kept weights that are copied again from the trained weights at every version that is a multiple of ``every``."""

    def __init__(self, copy: Copy, every: int) -> None:
        """Keep in ``copy`` the weights of the last version that is a multiple of ``every``."""
        super().__init__(copy)
        self._every = every

    def after_update(self, version: int) -> None:
        """Copy the new weights if ``version`` is a multiple of ``every``."""
        if version % self._every == 0:
            self._copy.take()


class Ring:
    """Kept weights of the last versions: a queue of at most ``len(copies)`` copies, the oldest first. It is empty at
    version 0, and each update adds one copy until it is full."""

    has_state = True

    def __init__(self, copies: Sequence[Copy]) -> None:
        """Create an empty queue of at most ``len(copies)`` versions. ``copies`` provide the memory; their present
        values are not used."""
        self._spare = list(copies)
        """The copies that are not in use yet."""
        self._ring: deque[Copy] = deque(maxlen=len(copies))
        """The copies in use, the oldest first."""

    def swap_in(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the oldest copy; with its own weights at version 0, when
        there is no copy yet."""
        return self._ring[0].swap_in() if self._ring else nullcontext()

    def __len__(self) -> int:
        """Return the number of versions that have a copy at present."""
        return len(self._ring)

    def swap_in_age(self, age: int) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the weights of ``age`` versions ago. ``age`` is between 1
        and ``len(self)``."""
        return self._ring[-age].swap_in()

    def before_update(self) -> None:
        """Save the present weights as the newest copy. If all copies are in use, it replaces the oldest one."""
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
        """Restore the kept versions from ``state``, the tensors of a snapshot, labelled ``place|name``. Raises
        ``ValueError`` for more versions than copies."""
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
    """Return the kept weights that ``config`` describes, with copies of the present weights. ``trained`` are the
    trained weights of ``model``."""

    def copy(dtype: torch.dtype | None = None) -> Copy:
        """Return a copy of the present weights on the device that ``config`` sets."""
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
