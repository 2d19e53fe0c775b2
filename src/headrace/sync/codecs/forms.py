"""The forms in which a tensor is sent: unchanged, rounded to a shorter floating-point format, or in eight bits. The
tensors that represent it in the image are its *parts*. Codecs (:mod:`headrace.sync.codecs`) refer to these forms.

A matrix in eight bits has one scale per row:

    scale_i = max_j |w_ij| / 448        q_ij = float8(w_ij / scale_i)        w'_ij = scale_i · q_ij

float8 is e4m3fn, whose largest number is 448 (Micikevicius et al. 2022, "FP8 formats for deep learning"). The error of
a weight is at most 1/16 of the weight, or 2⁻¹⁰ of the scale for small weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class IdentityForm:
    """A form that sends every tensor unchanged, bit for bit."""

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return ``tensor`` itself as its single part, called ``name``."""
        return {name: tensor}

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy ``tensor`` into its single part, converted to the part's dtype."""
        parts[0].copy_(tensor)

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Copy the single part into ``out``, converted to the dtype of ``out``."""
        out.copy_(parts[0])


class Cast(IdentityForm):
    """A form that rounds floating-point tensors to one dtype with torch's rounding (to nearest, ties to even). Other
    tensors are sent unchanged.

    >>> Cast(torch.bfloat16).parts("weight", torch.zeros(2, 3))["weight"].dtype
    torch.bfloat16
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Round to ``dtype``."""
        self._dtype = dtype

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the single part that represents ``tensor``, called ``name``: a tensor without data, of the dtype to
        which it is rounded."""
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return {name: torch.empty(tensor.shape, dtype=dtype, device="meta")}


_CODE_DTYPE = torch.float8_e4m3fn
_LARGEST_CODE = torch.finfo(_CODE_DTYPE).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The smallest scale, so that a row of zeros can be divided by it."""
_BLOCK = 1 << 18
"""The number of weights that are converted at once, so that intermediate results fit the processor's cache."""
SCALE = "row_scale"
"""The suffix of the name of a part that contains scales."""


class Float8:
    """A form that rounds floating-point tensors with two or more axes to eight bits, with one scale for each row (the
    entries along the last axis). Other tensors, which are small, are sent unchanged."""

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the parts that represent ``tensor``, by name: its 8-bit codes and one scale for each row. A tensor
        that is not rounded is its own single part."""
        if tensor.ndim < 2 or not tensor.numel() or not tensor.is_floating_point():
            return {name: tensor}
        rows = torch.Size([tensor.numel() // tensor.shape[-1], 1])
        return {
            name: torch.empty(tensor.shape, dtype=_CODE_DTYPE, device="meta"),
            f"{name}.{SCALE}": torch.empty(rows, dtype=torch.float32, device="meta"),
        }

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill the parts from ``tensor``: round it to 8 bits row by row, each row with the scale that makes its largest
        entry the largest code."""
        if len(parts) == 1:
            parts[0].copy_(tensor)
            return
        codes, scales = parts
        for weight_RC, code_RC, scale_R1 in _blocks_of_rows(tensor.contiguous(), codes, scales):
            wide_RC = weight_RC.float()
            scale_R1.copy_((wide_RC.abs().amax(1, keepdim=True) / _LARGEST_CODE).clamp(min=_SMALLEST_SCALE))
            code_RC.copy_((wide_RC / scale_R1.to(wide_RC.device)).clamp_(-_LARGEST_CODE, _LARGEST_CODE))

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Restore a tensor from its codes and scales into ``out``; copy the single part of a tensor that was not
        rounded."""
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        codes, scales = parts
        for out_RC, code_RC, scale_R1 in _blocks_of_rows(out, codes, scales):
            out_RC.copy_(code_RC.float() * scale_R1)


def _blocks_of_rows(weight: Tensor, codes: Tensor, scales: Tensor) -> zip[tuple[Tensor, Tensor, Tensor]]:
    """Return an iterator over blocks of rows: the same rows of a tensor, of its codes and of its scales. A block fits
    the processor's cache."""
    flat = (weight.view(-1, weight.shape[-1]), codes.view(-1, codes.shape[-1]), scales)
    rows = max(1, _BLOCK // weight.shape[-1])
    return zip(*(tensor.split(rows) for tensor in flat), strict=True)
