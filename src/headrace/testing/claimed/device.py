"""The tensors of a device that only claims to be one, and what a GPU would have to do for them.

The device is called ``cuda:0``, but its numbers are in host memory, so that tests need no GPU. Every operation comes
here: with a tensor of the device among its arguments by torch's own dispatch to subclasses, otherwise
(``torch.zeros(3, device="cuda")``) by the fallback that is registered for CUDA. It is computed by torch's CPU kernel on
the numbers in host memory. An operation on tensors of both devices fails as it would on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda:0")
"""The device as torch names it."""
MEMORY = 80 * 2**30
"""The memory that the device claims to have, in bytes."""
_CPU = torch.device("cpu")
_INNER = ("/torch/", "contextlib.py", "functools.py")
"""Parts of the names of files that only pass operations on; their lines are not reported."""
_COPIES = frozenset({"_to_copy", "copy_", "_foreach_copy_"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_COUNTED = frozenset(
    {
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "_local_scalar_dense",
        "equal",
    }
)
"""Operations whose result tells the CPU something that only the device knows, such as a size."""
_FREE = frozenset(
    {"view", "_unsafe_view", "_reshape_alias", "reshape", "t", "transpose", "permute", "expand", "select", "slice",
     "unsqueeze", "squeeze", "as_strided", "detach", "alias", "split", "split_with_sizes", "unbind", "chunk", "narrow",
     "diagonal", "unfold", "lift_fresh", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
)  # fmt: skip
"""Operations that launch no kernel: views and allocations."""


_OWN = ("copy_", "arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm", "tril_indices",
        "triu_indices")  # fmt: skip
"""Operations that torch would compute otherwise: by a kernel for CUDA where it skips Python, as for the list in
``tensor[[0, 2]]``, or by changing the size of an empty tensor."""


@dataclass(slots=True)
class Work:
    """The counts of the work that a GPU would have had to do since the last :meth:`reset`, by kind, and of the lines of
    code that caused it. Tests read them to find transfers and waits that a program should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    """The number of ``upload``, ``download``, ``wait``, ``launch`` and ``allocation``."""
    places: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of uploads, downloads and waits by kind and line of code."""

    def reset(self) -> None:
        """Set all counts to 0."""
        self.counts.clear()
        self.places.clear()

    def note(self, kind: str) -> None:
        """Count one transfer or wait of the given kind (``upload``, ``download`` or ``wait``), and the line of code
        that caused it."""
        self.counts[kind] += 1
        self.places[kind, _line()] += 1


WORK = Work()
"""The work of this process."""


class ClaimedTensor(torch.Tensor):
    """A tensor that says that it is on :data:`DEVICE`, with its numbers in an ordinary CPU tensor."""

    host: torch.Tensor
    """Its numbers, in host memory."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> ClaimedTensor:
        """Return a tensor of the device with the shape, layout and dtype of ``host``, which it shares."""
        made: ClaimedTensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            layout=host.layout, device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Return the result of ``op``, any operation of torch with such a tensor among its arguments."""
        return compute(op, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the inner tensors. That a class has this method tells torch that a parameter which moves
        to the device must become another object."""
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> ClaimedTensor:
        """Return the tensor with these inner tensors, the reverse of :meth:`__tensor_flatten__`."""
        return ClaimedTensor(inner["host"])

    @property
    def data(self) -> torch.Tensor:
        """This tensor without its gradient. Assigning another tensor of the device replaces the values."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        """Replace the numbers by those of ``other``, which must be a tensor of the device with the same shape and
        dtype."""
        if not isinstance(other, ClaimedTensor):
            raise RuntimeError(f"the data of a tensor on {DEVICE} is set to one on {other.device}")
        if (other.shape, other.dtype) != (self.shape, self.dtype):
            raise RuntimeError(f"the data of a tensor on {DEVICE} is set to one of another shape or dtype")
        self.host = other.host

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the numbers, by which programs recognise tensors that share memory."""
        return self.host.untyped_storage()

    def storage(self) -> Any:
        """Return the memory of the numbers as a typed storage, which safetensors asks for."""
        return self.host.storage()

    def data_ptr(self) -> int:
        """Return the address of the first number in host memory."""
        return self.host.data_ptr()

    def tolist(self) -> Any:
        """Return the numbers as Python values, after a download, which is counted."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array if ``force`` is given; otherwise fail, as a tensor on a GPU does."""
        if not force:
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy: copy it to host memory first")
        return self.cpu().numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"claimed({self.host!r})"


def compute(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of the torch operation ``op``, and count what a GPU would have to do for it. This is the one
    place to which all operations of the device come.

    ``args`` and ``kwargs`` are the arguments of the operation. The result is on the device if one of them is, or if
    they ask for the device, unless the operation copies to the CPU. Raises ``RuntimeError`` where tensors of the device
    and of the CPU are mixed as a GPU does not allow.
    """
    name = op.name().partition("::")[2].partition(".")[0]
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    here = [each for each in tensors if isinstance(each, ClaimedTensor)]
    there = [each for each in tensors if not isinstance(each, ClaimedTensor) and each.dim()]
    target = kwargs.get("device")
    claims = bool(here) if target is None else torch.device(target).type == DEVICE.type
    if name == "copy_":
        claims = isinstance(args[0], ClaimedTensor)
    if name in _COPIES:
        _note_copy(name, args, claims=claims, here=bool(here))
    elif here and there and name not in _INDEXING:
        raise RuntimeError(f"{op} got tensors on {DEVICE} and on {there[0].device}, at {_line()}")
    _note(op, name, args, there=bool(here and there))
    given = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if target is not None:
        given["device"] = _CPU
    result = _on_host(op, name, tree_map(_host, args), tree_map(_host, given))
    for each in here:
        if each.shape != each.host.shape:
            raise RuntimeError(f"{op} has changed the size of a tensor on {DEVICE}, which this device cannot do")
    if not claims:
        return result
    wrapped = tree_map(_claim, result)
    return return_and_correct_aliasing(op, args, kwargs, wrapped) if here else wrapped


def _on_host(op: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of the operation ``op``, called ``name``, on CPU tensors, with two exceptions for operations
    that GPUs and CPUs treat differently."""
    if name == "histc" and not args[0].is_floating_point():  # which GPUs can, and torch's CPU kernel cannot
        return op(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    result = op(*args, **kwargs)
    if name in ("_conj", "_neg_view"):  # torch reads from the outer tensor, which is not marked, whether one is pending
        return result.resolve_conj().resolve_neg()
    return result


def _note_copy(name: str, args: Any, *, claims: bool, here: bool) -> None:
    """Count the uploads and downloads of the copying operation ``name`` with the arguments ``args``. For ``_to_copy``,
    ``claims`` says whether the result is on the device, and ``here`` whether the source is."""
    if name == "_to_copy":
        pairs = [(claims, here)]
    else:
        targets, sources = ([args[0]], [args[1]]) if name == "copy_" else args[:2]
        pairs = [
            (isinstance(one, ClaimedTensor), isinstance(other, ClaimedTensor))
            for one, other in zip(targets, sources, strict=True)
        ]
    for target, source in pairs:
        if target != source:
            WORK.note("upload" if target else "download")


def _note(op: Any, name: str, args: Any, *, there: bool) -> None:
    """Count what a GPU would have to do for the operation ``op``, called ``name``, besides copies: waits for a result
    that the CPU needs, uploads of indices (``there``: an argument is on the CPU), launches and allocations."""
    if name in _COUNTED or (name == "repeat_interleave" and "Tensor" in str(op)):
        WORK.note("wait")
    elif name in _INDEXING:
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            WORK.note("wait")
        if there:
            WORK.note("upload")
    if name.startswith(("empty", "new_empty")):
        WORK.counts["allocation"] += 1
    elif name not in _FREE and name != "_local_scalar_dense":
        WORK.counts["launch"] += 1


def _host(value: Any) -> Any:
    """Return the CPU tensor with the numbers of a tensor of the device; any other value as it is."""
    return value.host if isinstance(value, ClaimedTensor) else value


def _claim(value: Any) -> Any:
    """Return a CPU tensor as a tensor of the device that shares its numbers; any other value as it is."""
    return ClaimedTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, ClaimedTensor) else value


def _line() -> str:
    """Return the innermost line of code outside torch that has caused the present operation, as ``file:line``; ``?``
    if there is none."""
    for frame in reversed(traceback.extract_stack(limit=80)):
        if frame.filename != __file__ and not any(part in frame.filename for part in _INNER):
            return f"{frame.filename.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{frame.lineno}"
    return "?"


def allocated_bytes() -> int:
    """Return the memory of all tensors of the device that this process holds, in bytes. It looks at every object of the
    process, which takes a moment."""
    storages = [each.host.untyped_storage() for each in gc.get_objects() if type(each) is ClaimedTensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Stream:
    """The replacement of ``torch.cuda.Stream``. Operations of the device are computed at once, so that its methods have
    nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


def _without_gradient(mode: Any = True) -> Any:
    """Return ``torch.no_grad()`` for ``torch.inference_mode()``, which this function replaces, since tensors of the
    latter cannot be those of a subclass. ``mode`` may be the function to decorate; false leaves gradients on."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.enable_grad()


def _wait(device: Any = None) -> None:
    """Count a wait, in place of ``torch.cuda.synchronize``."""
    WORK.note("wait")


_LIBRARY: list[torch.library.Library] = []
"""The registration of the fallback, which lasts as long as this object."""


def claim() -> None:
    """Make torch take the device for the GPU ``cuda:0`` in this process: register :func:`compute` for all operations,
    and replace the functions of ``torch.cuda``. The compiled part must have been loaded before torch."""
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: compute(op, args, kwargs), "CUDA")
    _LIBRARY.append(library)
    for name in _OWN:
        library = torch.library.Library("aten", "IMPL")
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, lambda *args, op=op, **kwargs: compute(op, args, kwargs), "CUDA")
        _LIBRARY.append(library)
    replaced: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "claimed",
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (MEMORY // 10, MEMORY),
        "memory_allocated": lambda device=None: allocated_bytes(),
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": _wait,
        "Stream": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.inference_mode = _without_gradient  # type: ignore[assignment, misc]
