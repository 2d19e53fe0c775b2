"""AdamW with moments of 8 bits, for ``learner.optimizer.kind = "adamw8bit"``: a subclass of torchao's optimizer, which
follows Dettmers et al. 2022.

    moment (float32) = map[code] · scale      code: 8 bits of each number;  scale: float32 of each block of 256 numbers

The moments of a weight are stored in 8 bits if the weight has at least 4096 numbers, and a multiple of 256: both
moments take 2.03 bytes per number, and not 8. The moments of other weights are plain tensors. The update itself is
computed in float32.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from headrace.base.errors import ConfigError

CODES, SCALE = ".codes", ".scale"
"""The suffixes of a moment's name in the names of its two tensors in a snapshot."""


@contextmanager
def _quietly() -> Iterator[None]:
    """Return a context in which torchao can be imported without its warnings about kernels for other versions of torch,
    which the optimizer does not use."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


with _quietly():
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit


class EightBitAdamW(AdamW8bit):  # type: ignore[misc]  # torchao has no types
    """AdamW of torchao with a state dict of plain tensors: the codes and the scales of a moment have names of their
    own.

    On a GPU, torch compiles the update for each shape, as in torchao. On a CPU, the same operations run uncompiled,
    which needs no compiler and saves a minute of compilation. The results are equal up to rounding.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        """Create the optimizer of the parameter ``groups`` with the learning rate ``lr``, the decay rates of both
        moments ``betas``, and ``eps``, the number that is added to the denominator. Raises
        :class:`~headrace.base.errors.ConfigError` if no weight is large enough for moments of 8 bits."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        self._on_cpu = all(weight.device.type == "cpu" for weight in weights)
        """Whether all weights are on a CPU."""
        if not any(_is_low_bit(moment) for weight in weights for moment in self.moments(_make_meta(weight)).values()):
            raise ConfigError(
                "learner.optimizer.kind='adamw8bit' has no effect: no trained weight has 4096 numbers or more, in "
                f"blocks of {self.block_size}; the largest of {len(weights)} has {max(w.numel() for w in weights)}",
                remedy="set learner.optimizer.kind = 'adamw'",
            )

    def moments(self, weight: Tensor) -> dict[str, Tensor]:
        """Return both moments of ``weight`` before its first update: zeros, in 8 bits if the weight is large enough.
        ``weight`` may be a tensor without memory (device ``meta``)."""
        # torchao has no public function for the choice of weights with 8-bit moments
        return {"exp_avg": self._new_buffer(weight, True), "exp_avg_sq": self._new_buffer(weight, False)}

    def set_rates(self, lr: float) -> None:
        """Set the learning rate of each parameter group to ``lr`` times the group's ``lr_scale``."""
        for group in self.param_groups:
            group["lr"].fill_(lr * group["lr_scale"])  # in place, since torchao's compiled update reads this tensor

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the weights that have a gradient. As in torch, ``closure`` computes the loss again, which is returned;
        ``None`` without a closure."""
        with torch.compiler.set_stance("force_eager" if self._on_cpu else "default"):
            loss: float | None = super().step(closure)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer. Every moment of 8 bits is two plain tensors, with the names that
        :meth:`plain` gives them."""
        tree = super().state_dict()
        return {**tree, "state": {number: self.plain(held) for number, held in tree["state"].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned. Raises ``ValueError`` for the state of another
        optimizer."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for number, tensors in state_dict["state"].items():
            state[number] = {"step": torch.tensor(0.0), **self.moments(weights[number])}
            self.fill(state[number], tensors)
        super().load_state_dict({**state_dict, "state": state})

    def plain(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of one weight's ``state``, without a copy: every moment of 8 bits as the two tensors
        ``NAME.codes`` and ``NAME.scale``."""
        found: dict[str, Tensor] = {}
        moment: Any
        for name, moment in state.items():
            low_bit = _is_low_bit(moment)
            found |= {name + CODES: moment.codes, name + SCALE: moment.scale} if low_bit else {name: moment}
        return found

    def fill(self, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors``, some or all of the tensors that :meth:`plain` returned, into the ``state`` of one weight.
        Raises ``ValueError`` for the tensors of another optimizer."""
        places = self.plain(state)
        for name, tensor in tensors.items():
            place = places.get(name)
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} is another optimizer's")
            place.copy_(tensor)


def _is_low_bit(moment: Any) -> bool:
    """Return whether a moment is one of torchao's tensors of 8 bits, not a plain tensor."""
    return isinstance(moment, OptimState8bit)


def _make_meta(weight: Parameter) -> Tensor:
    """Return a tensor without memory (device ``meta``) that has the shape and dtype of ``weight``."""
    return torch.empty_like(weight, device="meta", requires_grad=False)
