"""The compiled kernels as functions on tensors: float32 on a CPU, without gradients.

Each is batch-invariant: what one token gets depends on nothing else in the call, nor on the number of threads.

Shape legend: M tokens, K inputs, N outputs, E head size, H heads, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headrace.models.kernels.build import COMPILERS, Unavailable, kernel_cache, open_library

Pair = tuple[Tensor, Tensor | None]
"""A weight ``[N, K]`` and a bias ``[N]``."""


class Part(ctypes.Structure):
    """One of several products with the same tokens (linear.cpp)."""

    _fields_ = (("w", c_void_p), ("bias", c_void_p), ("y", c_void_p), ("N", c_long), ("ldy", c_long))


class Pass(ctypes.Structure):
    """The rows of a pass (paged.cpp)."""

    _fields_ = (
        ("tables", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("R", c_long),
        ("width", c_long),
    )


class Tensor3(ctypes.Structure):
    """A tensor ``[N, heads, size]`` whose last dimension is dense (paged.cpp)."""

    _fields_ = (("at", c_void_p), ("token", c_long), ("head", c_long))


class Layer(ctypes.Structure):
    """One layer's pools and rule (paged.cpp)."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("sinks", c_void_p),
        ("H", c_long),
        ("K", c_long),
        ("E", c_long),
        ("V", c_long),
        ("window", c_long),
        ("scale", c_float),
        ("softcap", c_float),
    )


_SIGNATURES = {
    "hr_linear": (c_void_p, c_long, c_long, c_long, POINTER(Part), c_long, c_int),
    "hr_gated": (c_void_p, c_long, c_long, c_long, POINTER(Part), POINTER(Part), POINTER(Part), c_int),
    "hr_norm": (c_void_p, c_long, c_void_p, c_void_p, c_long, c_long, c_float, c_float, c_int),
    "hr_heads": (
        *(c_void_p, c_long, c_long, c_long, c_long),
        *(c_void_p, c_int, c_float, c_float, c_void_p, c_void_p, c_long, c_int),
    ),
    "hr_log_softmax": (c_void_p, c_long, c_void_p, c_long, c_long, c_int),
    "hr_paged": (POINTER(Pass), POINTER(Layer), POINTER(Tensor3), c_void_p, c_int),
}


class Kernels:
    """The functions of a loaded library. Threads: as many as torch uses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, None
        self._linear, self._gated, self._norm = library.hr_linear, library.hr_gated, library.hr_norm
        self._heads, self._log_softmax, self.paged = library.hr_heads, library.hr_log_softmax, library.hr_paged

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + bias`` over the last dimension of ``x``."""
        return self.linears(x, ((weight, bias),))

    def linears(self, x: Tensor, pairs: Sequence[Pair]) -> Tensor:
        """Several products with one ``x``, side by side in the last dimension of the result."""
        x = x.contiguous()
        inputs = x.shape[-1]
        sizes = [weight.shape[0] for weight, _ in pairs]
        total = sum(sizes)
        y = torch.empty(*x.shape[:-1], total)
        parts = (Part * len(pairs))()
        at = y.data_ptr()
        for part, (weight, bias), size in zip(parts, pairs, sizes, strict=True):
            part.w, part.N, part.ldy, part.y = _at(weight), size, total, at
            part.bias = None if bias is None else _at(bias)
            at += 4 * size
        tokens = x.numel() // inputs
        self._linear(x.data_ptr(), inputs, tokens, inputs, parts, len(pairs), torch.get_num_threads())
        return y

    def gated(self, x: Tensor, gate: Pair, up: Pair, down: Pair) -> Tensor:
        """``down(silu(gate(x)) · up(x))`` over the last dimension of ``x``."""
        x = x.contiguous()
        inputs = x.shape[-1]
        tokens, inner, outputs = x.numel() // inputs, gate[0].shape[0], down[0].shape[0]
        hidden, y = torch.empty(2, tokens, inner), torch.empty(*x.shape[:-1], outputs)
        at = hidden.data_ptr()
        parts = [
            Part(_at(weight), None if bias is None else _at(bias), to, size, size)
            for (weight, bias), to, size in (
                (gate, at, inner),
                (up, at + 4 * tokens * inner, inner),
                (down, y.data_ptr(), outputs),
            )
        ]
        self._gated(x.data_ptr(), inputs, tokens, inputs, *parts, torch.get_num_threads())
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, plus: float = 0.0) -> Tensor:
        """``x / rms(x) · (weight + plus)`` over the last dimension."""
        x = x.contiguous()
        y = torch.empty_like(x)
        size = x.shape[-1]
        rows = x.numel() // size
        self._norm(x.data_ptr(), size, _at(weight), y.data_ptr(), rows, size, eps, plus, torch.get_num_threads())
        return y

    def heads_(self, x_MHE: Tensor, norm: tuple[Tensor, float, float] | None, turn: tuple[Tensor, Tensor]) -> None:
        """In place: norm every head (weight, eps, plus), then turn its halves by (cos ``[M, T]``, sin ``[M, T]``)."""
        tokens, heads, size = x_MHE.shape
        weight, eps, plus = norm if norm is not None else (None, 0.0, 0.0)
        cos, sin = turn
        self._heads(
            *(x_MHE.data_ptr(), x_MHE.stride(0), tokens, heads, size),
            *(None if weight is None else _at(weight), weight is not None, eps, plus),
            *(_at(cos), _at(sin), cos.shape[-1], torch.get_num_threads()),
        )

    def log_softmax(self, logits_MV: Tensor) -> Tensor:
        """Of the last dimension."""
        x = logits_MV.contiguous()
        y = torch.empty_like(x)
        size = x.shape[-1]
        self._log_softmax(x.data_ptr(), size, y.data_ptr(), x.numel() // size, size, torch.get_num_threads())
        return y


def _at(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def open_kernels(cache: Path, compilers: Sequence[str] = COMPILERS) -> Kernels | Unavailable:
    """The kernels, compiled and checked; or why there are none."""
    library = open_library(cache, compilers)
    if isinstance(library, Unavailable):
        return library
    kernels = Kernels(library)
    wrong = _check(kernels)
    return Unavailable(reason=f"the compiled kernels compute wrong {wrong}") if wrong else kernels


def _check(kernels: Kernels) -> str | None:
    """What a miscompiled library would get wrong."""
    rng = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(shape, generator=rng) for shape in ((7, 83), (21, 83), (21,)))
    y = kernels.linear(x, w, bias)
    if not torch.allclose(y, torch.nn.functional.linear(x, w, bias), rtol=1e-4, atol=1e-4):
        return "products"
    if not all(torch.equal(kernels.linear(x[i : i + 1], w, bias)[0], y[i]) for i in range(len(x))):
        return "products that depend on the batch"
    if not torch.allclose(kernels.log_softmax(y), y.log_softmax(-1), rtol=1e-4, atol=1e-4):
        return "exponentials"
    return None


@cache
def kernels() -> Kernels | Unavailable:
    """The kernels of this process, from the user's cache."""
    return open_kernels(kernel_cache())
