"""AdamW with moments of 8 bits, for ``learner.optimizer.kind = "adamw8bit"``: torchao's, after Dettmers et al. 2022.

    moment (float32) = map[code] · scale      code: 8 bits of each number;  scale: float32 of each block of 256 numbers

A moment of a weight with at least 4096 numbers, and a multiple of 256, is kept so: 2.03 bytes a number for both moments
in place of 8. Those of smaller weights stay as they are. The update itself is computed in float32.
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
"""What follows a moment's name in the names of its tensors in a snapshot."""


@contextmanager
def _quietly() -> Iterator[None]:
    """Import torchao without its notes about kernels for other versions of torch, which the optimizer does not use."""
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


class EightBitAdamW(AdamW8bit):  # type: ignore[misc]  # torchao is read as untyped
    """AdamW of torchao, whose state dict holds plain tensors: codes and scales under names of their own.

    On a GPU torch compiles the update of each shape, as torchao has it. On the CPU the same operations run one by one:
    that needs no compiler, and no minute of compiling. Both give the same numbers up to rounding.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        """Make the optimizer of parameter ``groups``. Raises :class:`~headrace.base.errors.ConfigError` if no weight is
        large enough for moments of 8 bits."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        self._on_cpu = all(weight.device.type == "cpu" for weight in weights)
        if not any(_is_low_bit(moment) for weight in weights for moment in self.moments(_shape_of(weight)).values()):
            raise ConfigError(
                "learner.optimizer.kind='adamw8bit' has no effect: no trained weight has 4096 numbers or more, in "
                f"blocks of {self.block_size}; the largest of {len(weights)} has {max(w.numel() for w in weights)}",
                remedy="set learner.optimizer.kind = 'adamw'",
            )

    def moments(self, weight: Tensor) -> dict[str, Tensor]:
        """Return both moments of ``weight`` before its first update: zeros, of 8 bits if the weight is large enough. A
        tensor without memory (device ``meta``) may stand for the weight."""
        # torchao has no public function that decides which weights are quantized
        return {"exp_avg": self._new_buffer(weight, True), "exp_avg_sq": self._new_buffer(weight, False)}

    def set_rates(self, lr: float) -> None:
        """Set the learning rate of each parameter group to ``lr`` times the group's ``lr_scale``."""
        for group in self.param_groups:
            group["lr"].fill_(lr * group["lr_scale"])  # torchao compiles the update over this very tensor

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the weights that have a gradient. As in torch, ``closure`` would compute the loss again, which is
        returned; ``None`` without it."""
        with torch.compiler.set_stance("force_eager" if self._on_cpu else "default"):
            done: float | None = super().step(closure)
        return done

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in which every moment of 8 bits is two plain tensors, as :meth:`plain` names them."""
        tree = super().state_dict()
        return {**tree, "state": {number: self.plain(held) for number, held in tree["state"].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises ``ValueError`` for the state of another optimizer."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for number, tensors in state_dict["state"].items():
            state[number] = {"step": torch.tensor(0.0), **self.moments(weights[number])}
            self.fill(state[number], tensors)
        super().load_state_dict({**state_dict, "state": state})

    def plain(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of one weight's state, which share its memory: every moment of 8 bits as ``NAME.codes``
        and ``NAME.scale``."""
        found: dict[str, Tensor] = {}
        moment: Any
        for name, moment in state.items():
            low_bit = _is_low_bit(moment)
            found |= {name + CODES: moment.codes, name + SCALE: moment.scale} if low_bit else {name: moment}
        return found

    def fill(self, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors``, some of those that :meth:`plain` returned, into the ``state`` of one weight. Raises
        ``ValueError`` for the tensors of another optimizer."""
        places = self.plain(state)
        for name, tensor in tensors.items():
            place = places.get(name)
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} is another optimizer's")
            place.copy_(tensor)


def _is_low_bit(moment: Any) -> bool:
    """Return whether a moment is one of torchao's tensors of 8 bits, not a plain tensor."""
    return isinstance(moment, OptimState8bit)


def _shape_of(weight: Parameter) -> Tensor:
    """Return a tensor with the shape and dtype of ``weight`` that takes no memory."""
    return torch.empty_like(weight, device="meta", requires_grad=False)
