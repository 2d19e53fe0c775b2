"""The compiled kernels as Python functions on tensors, for float32 or bfloat16 on a CPU, without gradients.

Each function is batch-invariant: the result for one token does not depend on the other tokens of the call, nor on the
number of threads. The classes derived from ``ctypes.Structure`` are the arguments of the C++ functions.

Shape legend: M tokens, K inputs, N outputs, G adapters, R rank of an adapter (in recurrent kernels: rows, the sequences
with one token each), E head size, H heads, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headrace.models.kernels.build import BFLOAT16, NATIVE, Unavailable, kernel_cache, open_library
from headrace.models.kernels.panels import PackedProduct

WIDEST = 4
"""The largest number of weights per channel in a convolution that the kernels support."""
FORMATS: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: BFLOAT16}
"""The number formats for which the kernels can be compiled, with the options of the compiler."""
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""The accepted relative and absolute error of a result in the test of a compiled library, by number format."""
Norm = tuple[Tensor, float, float]
"""The arguments of an RMS normalisation: the weight, ε, and the constant that is added to the weight."""


class Input(ctypes.Structure):
    """The input tokens of a call (``Input`` in linear.h): ``x`` is ``[M, K]``, and its row stride is ``ldx``
    numbers."""

    _fields_ = (("x", c_void_p), ("ldx", c_long), ("M", c_long), ("K", c_long))


class LoraPart(ctypes.Structure):
    """The product that LoRA adapters add to a matrix product (``Lora`` in linear.h).

    ``a`` ``[G, K, R]`` and ``b`` ``[G, R, N]`` are the matrices of G adapters; ``of`` ``[M]`` is the number of each
    token's adapter, −1 for none; ``h`` ``[M, R]`` is scratch memory, which the kernel allocates. R is the rank, padded
    to whole vectors of the processor.
    """

    _fields_ = (("a", c_void_p), ("b", c_void_p), ("of", c_void_p), ("h", c_void_p), ("R", c_long))


class ProductPart(ctypes.Structure):
    """One of several products ``y = x wᵀ + bias + add`` with the same input tokens x (``Part`` in linear.h). ``panels``
    is the weight ``w`` packed for the kernel, or null; the row stride of ``y`` is ``ldy`` numbers."""

    _fields_ = (
        ("w", c_void_p),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("add", c_void_p),
        ("y", c_void_p),
        ("N", c_long),
        ("ldy", c_long),
        ("lora", LoraPart),
    )


class Weight(ctypes.Structure):
    """A weight and the memory for its panels (``Weight`` in kernels.cpp): the address of ``w`` ``[N, K]``, and the
    address of ``panels``, to which the kernel writes the packed weight."""

    _fields_ = (("w", c_void_p), ("panels", c_void_p), ("N", c_long), ("K", c_long))


class NormOf(ctypes.Structure):
    """The parameters of an RMS normalisation of rows, ``x / rms(x) · (w + plus)`` (``Norm`` in linear.h). ``eps`` is
    added to the mean square; a null ``w`` means no normalisation."""

    _fields_ = (("w", c_void_p), ("eps", c_float), ("plus", c_float))


class RotaryArgs(ctypes.Structure):
    """The rotation of heads (``Turn`` in linear.h): ``cos`` and ``sin`` are ``[M, size]``, and the first ``size``
    numbers of each head become ``x cos + (-second half, first half) sin``."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("size", c_long))


class Block(ctypes.Structure):
    """The parts that all decoder layers have (``Block`` in kernels.cpp): the norms ``before`` and ``after`` the mixer,
    the mixer's output product ``out``, and the products ``gate``, ``up`` and ``down`` of the MLP."""

    _fields_ = (
        *((name, NormOf) for name in ("before", "after")),
        *((name, ProductPart) for name in ("out", "gate", "up", "down")),
    )


class Decoder(ctypes.Structure):
    """The parts of a decoder layer with attention (``Decoder`` in kernels.cpp): the common parts ``block``, the norms
    of ``query`` and ``key``, and the products of queries, keys and values. ``gated`` says whether the query product
    also contains a gate for the output of each head."""

    _fields_ = (("block", Block), ("query", NormOf), ("key", NormOf), ("parts", ProductPart * 3), ("gated", c_long))


class FilterOf(ctypes.Structure):
    """A causal convolution of ``C`` channels with ``W`` weights each (``Filter`` in recurrent.h): ``weight`` is ``[C,
    W]``, ``bias`` is ``[C]`` or null, and ``silu`` says whether SiLU follows."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("C", c_long), ("W", c_long), ("silu", c_int))


class DeltaNet(ctypes.Structure):
    """The parts of a mixer with the gated delta rule between its input and output products, and the states of its rows
    (``DeltaNet`` in recurrent.h).

    ``filter`` is the convolution of queries, keys and values; ``rate`` and ``step`` ``[H]`` are the logarithms of A and
    the biases of the step; ``norm`` normalises a head's output. ``windows`` and ``states`` are the pools of the two
    states, and ``of`` ``[R]`` is the slot of each row. There are R rows, G key heads of size K, and H value heads of
    size V.
    """

    _fields_ = (
        ("filter", FilterOf),
        *((name, c_void_p) for name in ("rate", "step")),
        ("norm", NormOf),
        *((name, c_void_p) for name in ("windows", "states", "of")),
        *((name, c_long) for name in ("R", "G", "H", "K", "V")),
    )


class DeltaDecoder(ctypes.Structure):
    """The parts of a decoder layer with the gated delta rule (``DeltaDecoder`` in kernels.cpp): the common parts
    ``block``, the mixer ``net``, and its four input products."""

    _fields_ = (("block", Block), ("net", DeltaNet), ("parts", ProductPart * 4))


class DecoderTokens(ctypes.Structure):
    """The tokens of a decoder layer's call (``Step`` in kernels.cpp): the addresses of the input ``x`` and the output
    ``y``, each ``[M, hidden]``, the address of scratch memory, and the rotation ``turn`` of the tokens' positions."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("scratch", c_void_p),
        ("turn", RotaryArgs),
        ("M", c_long),
        ("hidden", c_long),
    )


class Pass(ctypes.Structure):
    """The rows of a pass over a paged cache (``Pass`` in paged.h): ``tables`` ``[R, width]`` contains the blocks of
    each row, ``starts`` ``[R]`` its number of cached tokens, and ``counts`` ``[R]`` its number of new tokens."""

    _fields_ = (
        ("tables", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("R", c_long),
        ("width", c_long),
    )


class Tensor3(ctypes.Structure):
    """A tensor ``[N, heads, size]`` whose last dimension is contiguous (``Tensor3`` in paged.h): its address ``at``,
    and the strides of its first two dimensions, ``token`` and ``head``, in numbers."""

    _fields_ = (("at", c_void_p), ("token", c_long), ("head", c_long))


class PagedLayer(ctypes.Structure):
    """The pools of one layer, and its attention parameters (``Layer`` in paged.h).

    ``keys`` and ``values`` are the addresses of the pools; ``sinks`` ``[H]`` is the address of the sinks, or null.
    There are H query heads and K key-value heads; E and V are the sizes of a key and of a value. A ``window``,
    ``chunk`` or ``softcap`` of 0 means that there is none.
    """

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("sinks", c_void_p),
        ("H", c_long),
        ("K", c_long),
        ("E", c_long),
        ("V", c_long),
        ("window", c_long),
        ("chunk", c_long),
        ("scale", c_float),
        ("softcap", c_float),
    )


class PoolSlots(ctypes.Structure):
    """The slots of R sequences in a ``pool`` of states (``Slots`` in recurrent.h): ``of`` ``[R]`` is the slot of each
    sequence."""

    _fields_ = (("pool", c_void_p), ("of", c_void_p), ("R", c_long))


class HeadInputs(ctypes.Structure):
    """A contiguous tensor ``[R, heads, size]`` at the address ``at`` (``Heads`` in recurrent.h)."""

    _fields_ = (("at", c_void_p), ("heads", c_long), ("size", c_long))


_SIGNATURES = {
    "hr_unit": (),
    "hr_panels": (c_long, c_long),
    "hr_pack": (POINTER(Weight), c_long, c_int),
    "hr_linear": (POINTER(Input), POINTER(ProductPart), c_long, c_int),
    "hr_gated": (POINTER(Input), POINTER(ProductPart), POINTER(ProductPart), POINTER(ProductPart), c_int),
    "hr_norm": (POINTER(Input), POINTER(NormOf), c_void_p, c_int),
    "hr_heads": (c_void_p, *(c_long,) * 5, POINTER(NormOf), POINTER(RotaryArgs), c_int),
    "hr_gate": (c_void_p, POINTER(Tensor3), c_long, c_long, c_long, c_int),
    "hr_paged": (POINTER(Pass), POINTER(PagedLayer), POINTER(Tensor3), c_void_p, c_int),
    "hr_decoder": (POINTER(DecoderTokens), POINTER(Decoder), POINTER(Pass), POINTER(PagedLayer), c_int),
}
"""The argument types of the C++ functions for both number formats."""
_FLOAT32_SIGNATURES = {
    "hr_log_softmax": (POINTER(Input), c_void_p, c_int),
    "hr_convolve": (POINTER(PoolSlots), POINTER(FilterOf), c_void_p, c_long, c_void_p, c_int),
    "hr_delta": (POINTER(PoolSlots), POINTER(HeadInputs), c_void_p, c_void_p, c_int, c_void_p, c_int),
    "hr_delta_net": (POINTER(DeltaNet), c_void_p, c_long, c_void_p, c_int),
    "hr_scan": (
        *(POINTER(PoolSlots), POINTER(HeadInputs), c_void_p, POINTER(HeadInputs), c_void_p, c_void_p, c_void_p, c_int),
    ),
    "hr_select": (
        *(POINTER(PoolSlots), POINTER(HeadInputs), c_void_p, POINTER(HeadInputs), c_void_p, c_void_p, c_int),
    ),
    "hr_delta_decoder": (POINTER(DecoderTokens), POINTER(DeltaDecoder), c_int),
}
"""The argument types of the C++ functions that exist for float32 alone."""


class Kernels:
    """The functions of a loaded library of kernels, for tensors. They use as many threads as torch."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype = torch.float32) -> None:
        """Declare the argument types of the functions in ``library``, the kernels that are compiled for tokens, weights
        and caches of ``dtype``: float32, or bfloat16, for which there are no kernels of recurrences."""
        self.dtype = dtype
        """The number format of the tensors. Sums and adapters are float32 in both."""
        for name, signature in (_SIGNATURES | (_FLOAT32_SIGNATURES if dtype == torch.float32 else {})).items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, None
        library.hr_panels.restype, library.hr_unit.restype = c_long, c_char_p
        self.unit: str = library.hr_unit().decode()
        """What multiplies: ``float32``, or for bfloat16 also ``AVX-512 BF16`` or ``AMX``, which are faster."""
        self._panels, self._pack = library.hr_panels, library.hr_pack
        self._linear, self._gated, self._norm = library.hr_linear, library.hr_gated, library.hr_norm
        self._heads, self._gate = library.hr_heads, library.hr_gate
        self.paged, self.decoder = library.hr_paged, library.hr_decoder
        if dtype != torch.float32:
            return
        self._log_softmax, self.delta_decoder = library.hr_log_softmax, library.hr_delta_decoder
        self._convolve, self._delta, self._delta_net = library.hr_convolve, library.hr_delta, library.hr_delta_net
        self._scan, self._select = library.hr_scan, library.hr_select

    def panel_numbers(self, weight: Tensor) -> int:
        """Return the number of elements of the panels of ``weight``, whose rows are rounded up to whole panels, and its
        inputs up to what the processor multiplies at once."""
        return int(self._panels(*weight.shape))

    def pack(self, pairs: Sequence[tuple[Tensor, Tensor]], threads: int) -> None:
        """Pack weights with ``threads`` threads. Each pair consists of a weight and the memory for its panels, which
        has :meth:`panel_numbers` elements."""
        weights = (Weight * len(pairs))(*(Weight(at(w), at(panels), *w.shape) for w, panels in pairs))
        self._pack(weights, len(pairs), threads)

    def linear(self, x: Tensor, weights: PackedProduct) -> Tensor:
        """Return ``x Wᵀ + bias`` over the last dimension of ``x``; ``weights`` has W and the bias."""
        return self.linears(x, (weights,))

    def linears(self, x: Tensor, several: Sequence[PackedProduct]) -> Tensor:
        """Return the products of several weights with the same ``x``, concatenated in the last dimension."""
        x = self._dense(x)
        total = sum(weights.weight.shape[0] for weights in several)
        y = torch.empty(*x.shape[:-1], total, dtype=self.dtype)
        parts = (ProductPart * len(several))()
        to, tokens = y.data_ptr(), _input(x)
        for part, weights in zip(parts, several, strict=True):
            point(part, weights, tokens.M)
            part.y, part.ldy = to, total
            to += y.itemsize * part.N
        self._linear(tokens, parts, len(several), torch.get_num_threads())
        return y

    def gated(self, x: Tensor, gate: PackedProduct, up: PackedProduct, down: PackedProduct) -> Tensor:
        """Return ``down(silu(gate(x)) · up(x))`` over the last dimension of ``x``."""
        x = self._dense(x)
        tokens = _input(x)
        hidden = torch.empty(2, tokens.M, gate.weight.shape[0], dtype=self.dtype)
        y = torch.empty(*x.shape[:-1], down.weight.shape[0], dtype=self.dtype)
        parts = (ProductPart * 3)()
        for part, weights, to in zip(parts, (gate, up, down), (*hidden, y), strict=True):
            point(part, weights, tokens.M)
            part.y, part.ldy = to.data_ptr(), part.N
        self._gated(tokens, *parts, torch.get_num_threads())
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, plus: float = 0.0) -> Tensor:
        """Return ``x / rms(x) · (weight + plus)`` over the last dimension; ``eps`` is added to the mean square."""
        x = self._dense(x)
        y = torch.empty_like(x)
        self._norm(_input(x), norm_args((weight, eps, plus)), y.data_ptr(), torch.get_num_threads())
        return y

    def _dense(self, x: Tensor) -> Tensor:
        """Return ``x`` as a contiguous tensor. Raises ``ValueError`` if it does not have the number format of the
        kernels, which would read other numbers."""
        if x.dtype != self.dtype:
            raise ValueError(f"tokens in {x.dtype} for kernels that compute {self.dtype}")
        return x.contiguous()

    def heads_(self, x_MHE: Tensor, norm: Norm | None, turn: tuple[Tensor, Tensor]) -> None:
        """Normalise every head of ``x_MHE`` in place, then rotate it by ``turn``, the cosines and sines ``[M, T]``."""
        shape = (x_MHE.stride(0), x_MHE.stride(1), *x_MHE.shape)
        self._heads(x_MHE.data_ptr(), *shape, norm_args(norm), rotary_args(turn), torch.get_num_threads())

    def gate_(self, x_MHV: Tensor, gate_MHV: Tensor) -> None:
        """Multiply ``x_MHV``, which must be contiguous, by the sigmoid of ``gate_MHV``, in place."""
        gate = Tensor3(gate_MHV.data_ptr(), gate_MHV.stride(0), gate_MHV.stride(1))
        self._gate(at(x_MHV), gate, *x_MHV.shape, torch.get_num_threads())

    def log_softmax(self, logits_MV: Tensor) -> Tensor:
        """Return the log-softmax of ``logits_MV`` over the last dimension."""
        x = logits_MV.contiguous()
        y = torch.empty_like(x)
        self._log_softmax(_input(x), y.data_ptr(), torch.get_num_threads())
        return y

    def convolve(
        self, x_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, *, silu: bool, pool: Tensor, slots_R: Tensor
    ) -> Tensor:
        """Return the convolution ``[R, C]`` of each row's window and its new input ``x_RC`` with ``weight_CW`` and
        ``bias_C``, followed by SiLU if ``silu``. The windows, which are in the slots ``slots_R`` of ``pool`` ``[P, C, W
        - 1]``, are shifted to include the new input."""
        weight, y = weight_CW.contiguous(), torch.empty(x_RC.shape)
        x = x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
        self._convolve(
            *(_slots_args(pool, slots_R), filter_args(weight, bias_C, silu=silu), x.data_ptr(), x.stride(0), at(y)),
            torch.get_num_threads(),
        )
        return y

    def delta(self, inputs_R: Sequence[Tensor], *, normed: bool, pool: Tensor, slots_R: Tensor) -> Tensor:
        """Return the output ``[R, H, V]`` of the gated delta rule for one token per row, and update the states in the
        slots ``slots_R`` of ``pool`` ``[P, H, K, V]``. ``inputs_R`` are queries, keys, values, log decays and rates;
        with ``normed``, queries and keys are normalised first."""
        dense = [each.contiguous() for each in inputs_R]
        decay, rate, y = dense[3], dense[4], torch.empty_like(dense[2])
        self._delta(
            *(
                _slots_args(pool, slots_R),
                (HeadInputs * 3)(*map(_head_args, dense[:3])),
                at(decay),
                at(rate),
                int(normed),
            ),
            *(at(y), torch.get_num_threads()),
        )
        return y

    def delta_net(self, net: DeltaNet, rows_RN: Tensor) -> Tensor:
        """Return the output ``[R, H · V]`` of a mixer with the gated delta rule before its output product, for one
        token per row, and update its states. ``net`` is the kernel's description of the mixer with its weights and
        states, and ``rows_RN`` are the mixer's concatenated input products; they are overwritten."""
        y = torch.empty(rows_RN.shape[0], net.H * net.V)
        self._delta_net(net, rows_RN.data_ptr(), rows_RN.stride(0), at(y), torch.get_num_threads())
        return y

    def scan(
        self, inputs_R: Sequence[Tensor], rate_H: Tensor, skip_H: Tensor | None, *, pool: Tensor, slots_R: Tensor
    ) -> Tensor:
        """Return the output ``[R, H, E]`` of Mamba-2's state space for one token per row, and update the states in the
        slots ``slots_R`` of ``pool`` ``[P, H, E, S]``. ``inputs_R`` are inputs, steps, B and C; ``rate_H`` is A of each
        head, and ``skip_H`` is D, or ``None`` for none."""
        x, step, *both = (each.contiguous() for each in inputs_R)
        y, rate, skip = torch.empty_like(x), rate_H.contiguous(), None if skip_H is None else skip_H.contiguous()
        self._scan(
            *(_slots_args(pool, slots_R), _head_args(x), at(step), (HeadInputs * 2)(*map(_head_args, both)), at(rate)),
            *(None if skip is None else at(skip), at(y), torch.get_num_threads()),
        )
        return y

    def select(self, inputs_R: Sequence[Tensor], rate_ES: Tensor, *, pool: Tensor, slots_R: Tensor) -> Tensor:
        """Return the output ``[R, E]`` of Mamba's selective state space for one token per row, and update the states in
        the slots ``slots_R`` of ``pool`` ``[P, E, S]``. ``inputs_R`` are inputs, steps, B and C; ``rate_ES`` is A."""
        x, step, *both = (each.contiguous() for each in inputs_R)
        y, rate = torch.empty_like(x), rate_ES.contiguous()
        vectors = (HeadInputs * 2)(*(_head_args(each[:, None]) for each in both))
        self._select(
            *(_slots_args(pool, slots_R), _head_args(x[:, None]), at(step), vectors, at(rate), at(y)),
            torch.get_num_threads(),
        )
        return y


def filter_args(weight_CW: Tensor, bias_C: Tensor | None, *, silu: bool) -> FilterOf:
    """Return the kernel's argument for a convolution with ``weight_CW``, at most :data:`WIDEST` weights per channel,
    and ``bias_C``, followed by SiLU if ``silu``."""
    return FilterOf(at(weight_CW), None if bias_C is None else at(bias_C), *weight_CW.shape, int(silu))


def _slots_args(pool: Tensor, slots_R: Tensor) -> PoolSlots:
    """Return the kernel's argument for the slots ``slots_R`` of R sequences in a pool of states."""
    return PoolSlots(at(pool), at(slots_R), len(slots_R))


def _head_args(tensor_RHE: Tensor) -> HeadInputs:
    """Return the kernel's argument for a contiguous tensor of heads."""
    return HeadInputs(at(tensor_RHE), *tensor_RHE.shape[1:])


def at(tensor: Tensor) -> int:
    """Return the memory address of a contiguous tensor, for an argument of a kernel."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def point(part: ProductPart, weights: PackedProduct, num_tokens: int) -> None:
    """Set ``part``, the argument of a product of ``num_tokens`` tokens, to the present addresses of the weights and
    adapters. Raises ``ValueError`` if adapter numbers exist for fewer tokens."""
    weight, bias, panels, lora = weights
    part.w, part.N, part.bias = at(weight), weight.shape[0], None if bias is None else at(bias)
    part.panels = None if panels is None else at(panels)
    if lora is not None:
        if len(lora.adapter_N) < num_tokens:  # the kernel would read beyond the end of the tensor
            raise ValueError(f"{num_tokens} tokens, and adapters for {len(lora.adapter_N)} of them")
        part.lora.a, part.lora.b, part.lora.of = at(lora.a_GIR), at(lora.b_GRO), at(lora.adapter_N)
        part.lora.R = lora.b_GRO.shape[1]


def norm_args(norm: Norm | None) -> NormOf:
    """Return the kernel's argument for a normalisation, with the weight's present address. ``None`` means no
    normalisation."""
    return NormOf() if norm is None else NormOf(at(norm[0]), norm[1], norm[2])


def rotary_args(turn: tuple[Tensor, Tensor]) -> RotaryArgs:
    """Return the kernel's argument for a rotation by ``turn``, the cosines and sines ``[M, T]``."""
    cos, sin = turn
    return RotaryArgs(at(cos), at(sin), cos.shape[-1])


def _input(x: Tensor) -> Input:
    """Return the kernel's argument for a contiguous ``x``, whose last dimension is the inputs of a token."""
    size = x.shape[-1]
    return Input(x.data_ptr(), size, x.numel() // size, size)


def open_kernels(
    cache: Path, target: Sequence[str] = NATIVE, dtype: torch.dtype = torch.float32
) -> Kernels | Unavailable:
    """Return the kernels for tensors of ``dtype``, compiled for ``target`` into the directory ``cache`` and tested, or
    the reason why they are not available."""
    library = open_library(cache, target=(*target, *FORMATS[dtype]))
    if isinstance(library, Unavailable):
        return library
    kernels = Kernels(library, dtype)
    wrong = _check(kernels)
    return Unavailable(reason=f"the compiled kernels compute wrong {wrong}") if wrong else kernels


def _check(kernels: Kernels) -> str | None:
    """Test a few results of ``kernels``, since a compiler may be faulty. Return what is wrong, in words; ``None`` if
    all are right."""
    rng, tolerance = torch.Generator().manual_seed(0), _TOLERANCES[kernels.dtype]
    x, w, bias = (torch.randn(shape, generator=rng).to(kernels.dtype) for shape in ((7, 83), (21, 83), (21,)))
    panels = torch.empty(kernels.panel_numbers(w), dtype=kernels.dtype)
    kernels.pack([(w, panels)], 1)
    y, rows = kernels.linear(x, PackedProduct(w, bias, panels)), x.float()
    expected = torch.nn.functional.linear(rows, w.float(), bias.float())
    if not torch.allclose(y.float(), expected, rtol=tolerance, atol=tolerance):
        return "products"
    if not all(torch.equal(kernels.linear(x[i : i + 1], PackedProduct(w, bias))[0], y[i]) for i in range(len(x))):
        return "products that depend on the batch"
    if kernels.dtype == torch.float32 and not torch.allclose(
        kernels.log_softmax(y), y.log_softmax(-1), rtol=tolerance, atol=tolerance
    ):
        return "log-softmax"
    ones = PackedProduct(torch.eye(83, dtype=kernels.dtype))
    inner = kernels.gated(x, ones, ones, ones).float()
    if not torch.allclose(inner, torch.nn.functional.silu(rows) * rows, rtol=tolerance, atol=tolerance):
        return "exponentials"
    return None


@cache
def kernels(dtype: torch.dtype = torch.float32) -> Kernels | Unavailable:
    """Return the kernels of this process for tensors of ``dtype`` from the user's cache, or the reason why they are not
    available."""
    return open_kernels(kernel_cache(), dtype=dtype)
