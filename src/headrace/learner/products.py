"""Large matrix products of a learner by oneDNN, on processors for which torch's default library is slow.

On x86 processors torch multiplies float32 matrices with MKL, whose AVX-512 code runs on Intel's processors only. On
AMD's processors, oneDNN, which torch also contains, is about twice as fast (docs/log.md). There, products above a size
are computed by oneDNN. All other products, and products on other processors, are computed by MKL, torch's default
library.

Shape legend: M rows, K inputs, N outputs of a linear layer.
"""

from __future__ import annotations

import platform
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGE = 1 << 27
"""The least number of multiplications of a product that oneDNN computes. For smaller products, the gain is less than
the preparation, which takes half a millisecond for each new shape; shapes change with every micro-batch."""


def install(model: nn.Module, most_rows: int) -> bool:
    """Replace the forward methods of the linear layers of ``model`` so that large products, also those of the
    gradients, are computed by oneDNN, if that is faster on this processor. Layers whose forward another library has
    replaced are not changed. Return whether a pass of ``most_rows`` rows has large products."""
    found = False
    for module in model.modules() if onednn_is_faster() else ():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]
            found |= most_rows * module.weight.numel() >= LARGE
    return found


def padded_rows(num_rows: int) -> int:
    """Return the number of rows to which a pass of ``num_rows`` rows is padded, so that only 16 shapes occur between
    two powers of two. oneDNN keeps a program for each shape, and the memory between these programs is fragmented.

    >>> [padded_rows(rows) for rows in (20, 1000, 1024, 1025, 2047)]
    [20, 1024, 1024, 1088, 2048]
    """
    step = 1 << max(0, num_rows.bit_length() - 5)
    return -(-num_rows // step) * step


@lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than MKL on this machine: on a processor with AVX-512
    that is not Intel's. The processor decides, and not a measurement, so that all ranks and all lives of a run compute
    with the same library."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    is_available = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and _onednn() is not None
    return (
        is_available
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _cpu_vendor() not in ("", "GenuineIntel")
    )


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product ``left @ right`` to ``total``, in place. The product is computed in the dtype of ``left``
    and ``right``, and the sum in the dtype of ``total``, which may be wider."""
    if _is_large(left, right.t()):
        total += _product(left, right)
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product ``left @ right``, without a gradient, computed by the faster library."""
    return _product(left, right) if _is_large(left, right.t()) else left @ right


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return ``x @ weight + bias`` as ``torch.nn.functional.linear`` does, with gradients. The last axis of ``x`` has
    the K inputs."""
    if not _is_large(x, weight_NK):
        return F.linear(x, weight_NK, bias_N)
    out: Tensor = _Linear.apply(x, weight_NK, bias_N)  # type: ignore[no-untyped-call]
    return out


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    """Compute the linear layer ``module``; replaces its own forward, so the argument has the same name there."""
    return linear(input, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    """The autograd function of :func:`linear`, whose gradients are also computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Compute the layer, and save its input and its weight for the gradient."""
        ctx.save_for_backward(x, weight_NK)
        out = _product(x.reshape(-1, x.shape[-1]), weight_NK.t(), bias_N)
        return out.view(*x.shape[:-1], len(weight_NK))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of input, weight and bias; ``None`` for a gradient that is not needed."""
        x, weight_NK = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_MN = gradients[0].reshape(-1, len(weight_NK))
        x_MK = x.reshape(-1, x.shape[-1])
        return (
            _product(grad_MN, weight_NK).view_as(x) if need_x else None,
            _outer(grad_MN, x_MK) if need_weight else None,
            grad_MN.sum(0) if need_bias else None,
        )


def _is_large(x: Tensor, weight_NK: Tensor) -> bool:
    """Return whether oneDNN should compute the product of ``x`` and ``weight_NK``: both are plain float32 tensors on a
    CPU, the product is large, and oneDNN is faster on this machine."""
    plain = type(x) is Tensor and type(weight_NK) in (Tensor, nn.Parameter)  # not DTensors
    on_cpu = plain and x.device.type == "cpu" and x.dtype is weight_NK.dtype is torch.float32
    return on_cpu and x.numel() * len(weight_NK) >= LARGE and onednn_is_faster()


def _outer(grad_MN: Tensor, x_MK: Tensor) -> Tensor:
    """Return the gradient ``gradᵀ @ x`` of a weight. oneDNN copies a transposed first operand, so the narrower matrix
    is the first one."""
    if grad_MN.shape[1] <= x_MK.shape[1]:
        return _product(grad_MN.t(), x_MK)
    return _product(x_MK.t(), grad_MN).t()


def _product(left: Tensor, right: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return ``left @ right`` plus ``bias_N`` (``None``: no bias), computed by oneDNN, without a gradient."""
    multiply = _onednn()
    assert multiply is not None
    out: Tensor = multiply(_dense(left), _dense(right).t(), bias_N, "none", [], "")
    return out


def _dense(matrix: Tensor) -> Tensor:
    """Return ``matrix`` itself if it or its transpose is contiguous, otherwise a contiguous copy. For other layouts,
    such as a slice of columns, oneDNN uses an algorithm that is a thousand times slower."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


@lru_cache(maxsize=1)
def _onednn() -> Any | None:
    """Return torch's internal operator for a linear layer by oneDNN, which torch.compile uses; ``None`` if this version
    of torch has no operator with this name and signature. Torch has no public operator for it."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # gate: getattr - it may be renamed
        return None
    operator = torch.ops.mkldnn._linear_pointwise.default
    names = [argument.name for argument in operator._schema.arguments]
    return operator if names == ["X", "W", "B", "attr", "scalars", "algorithm"] else None


def _cpu_vendor() -> str:
    """Return the vendor of this machine's processor in the notation of Linux, such as ``AuthenticAMD``; empty if it is
    unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
