"""The tensors of the claimed device, which is a simulated GPU, and counters of the work that a real GPU would have to
do.

The device is called ``cuda:0``, but its tensors are in host memory, so that tests need no GPU. torch calls
:func:`compute` for every operation: if an argument is a tensor of the device, by the dispatch to tensor subclasses,
otherwise (``torch.zeros(3, device="cuda")``) by a fallback that is registered for CUDA. The operation is computed by
torch's CPU kernel. An operation on tensors of both devices fails as on a GPU.
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
_SKIPPED_FILES = ("/torch/", "contextlib.py", "functools.py")
"""Parts of the paths of files that only forward operations, which :func:`_line` skips."""
_COPIES = frozenset({"_to_copy", "copy_", "_foreach_copy_"})
"""Operations that copy between tensors, and possibly between devices."""
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
"""Operations that index a tensor with tensors, which may be on the CPU."""
_WAITING = frozenset(
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
"""Operations for which the CPU has to wait, because it needs a value that is computed on the device, such as a size."""
_WITHOUT_LAUNCH = frozenset(
    {"view", "_unsafe_view", "_reshape_alias", "reshape", "t", "transpose", "permute", "expand", "select", "slice",
     "unsqueeze", "squeeze", "as_strided", "detach", "alias", "split", "split_with_sizes", "unbind", "chunk", "narrow",
     "diagonal", "unfold", "lift_fresh", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
)  # fmt: skip
"""Operations that launch no kernel: views and allocations."""


_OWN = ("copy_", "arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm", "tril_indices",
        "triu_indices")  # fmt: skip
"""Operations that need an explicit registration, because torch would compute them without a call of :func:`compute`:
internally, as for the list in ``tensor[[0, 2]]``, or by changing the size of an empty tensor."""


@dataclass(slots=True)
class Work:
    """The counts of the work that a GPU would have had to do since the last :meth:`reset`, by kind, and the lines of
    code that caused it. Tests read them to find unwanted transfers and waits."""

    counts: Counter[str] = field(default_factory=Counter)
    """The number of operations of each kind: ``upload``, ``download``, ``wait``, ``launch`` and ``allocation``."""
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
    """A tensor of the claimed device: it reports :data:`DEVICE` as its device, and its values are in an ordinary CPU
    tensor."""

    host: torch.Tensor
    """The CPU tensor with the values."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> ClaimedTensor:
        """Return a tensor of the device with the shape, layout and dtype of ``host``, whose memory it shares."""
        made: ClaimedTensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            layout=host.layout, device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Return the result of the operation ``op``. torch calls this if an argument is a tensor of the device."""
        return compute(op, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the inner tensors. Because the class has this method, torch creates a new object for a
        parameter that moves to the device."""
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> ClaimedTensor:
        """Return the tensor with the inner tensors ``inner``. It is the inverse of :meth:`__tensor_flatten__`."""
        return ClaimedTensor(inner["host"])

    @property
    def data(self) -> torch.Tensor:
        """This tensor without its gradient. Assigning another tensor of the device replaces the values."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        """Replace the values by the values of ``other``, which must be a tensor of the device with the same shape and
        dtype."""
        if not isinstance(other, ClaimedTensor):
            raise RuntimeError(f"the data of a tensor on {DEVICE} is set to one on {other.device}")
        if (other.shape, other.dtype) != (self.shape, self.dtype):
            raise RuntimeError(f"the data of a tensor on {DEVICE} is set to one of another shape or dtype")
        self.host = other.host

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the values, by which programs recognise tensors that share memory."""
        return self.host.untyped_storage()

    def storage(self) -> Any:
        """Return the memory of the values as a typed storage, which safetensors requires."""
        return self.host.storage()

    def data_ptr(self) -> int:
        """Return the address of the first value in host memory."""
        return self.host.data_ptr()

    def tolist(self) -> Any:
        """Return the values as Python numbers. This counts as a download."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array if ``force`` is given; otherwise fail, as a tensor on a GPU does."""
        if not force:
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy: copy it to host memory first")
        return self.cpu().numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a text that shows the values."""
        return f"claimed({self.host!r})"


def compute(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of the torch operation ``op``, and count the work that a GPU would have to do. torch calls this
    function for all operations of the device.

    ``args`` and ``kwargs`` are the arguments of the operation. The result is on the device if an argument is, or if
    ``kwargs`` request the device, unless the operation copies to the CPU. Raises ``RuntimeError`` for a mixture of
    tensors of the device and of the CPU that a GPU does not allow.
    """
    name = op.name().partition("::")[2].partition(".")[0]
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    on_device = [each for each in tensors if isinstance(each, ClaimedTensor)]
    on_cpu = [each for each in tensors if not isinstance(each, ClaimedTensor) and each.dim()]
    target = kwargs.get("device")
    result_on_device = bool(on_device) if target is None else torch.device(target).type == DEVICE.type
    if name == "copy_":
        result_on_device = isinstance(args[0], ClaimedTensor)
    if name in _COPIES:
        _count_copy(name, args, claims=result_on_device, here=bool(on_device))
    elif on_device and on_cpu and name not in _INDEXING:
        raise RuntimeError(f"{op} got tensors on {DEVICE} and on {on_cpu[0].device}, at {_line()}")
    _count_work(op, name, args, there=bool(on_device and on_cpu))
    host_kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if target is not None:
        host_kwargs["device"] = _CPU
    result = _on_host(op, name, tree_map(_host, args), tree_map(_host, host_kwargs))
    for each in on_device:
        if each.shape != each.host.shape:
            raise RuntimeError(f"{op} has changed the size of a tensor on {DEVICE}, which this device cannot do")
    if not result_on_device:
        return result
    wrapped = tree_map(_claim, result)
    return return_and_correct_aliasing(op, args, kwargs, wrapped) if on_device else wrapped


def _on_host(op: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of the operation ``op``, called ``name``, on CPU tensors. Two operations that differ between
    GPUs and CPUs are replaced."""
    if name == "histc" and not args[0].is_floating_point():  # torch's CPU kernel does not support integers, unlike GPUs
        return op(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    result = op(*args, **kwargs)
    # torch reads the mark of a lazy conjugation or negation from the outer tensor, which does not have it
    if name in ("_conj", "_neg_view"):
        return result.resolve_conj().resolve_neg()
    return result


def _count_copy(name: str, args: Any, *, claims: bool, here: bool) -> None:
    """Count the uploads and downloads of the copying operation ``name`` with the arguments ``args``. For ``_to_copy``,
    ``claims`` says whether the result is on the device, and ``here`` whether the source is on the device."""
    if name == "_to_copy":
        pairs = [(claims, here)]
    else:
        targets, sources = ([args[0]], [args[1]]) if name == "copy_" else args[:2]
        pairs = [
            (isinstance(target_tensor, ClaimedTensor), isinstance(source_tensor, ClaimedTensor))
            for target_tensor, source_tensor in zip(targets, sources, strict=True)
        ]
    for target, source in pairs:
        if target != source:
            WORK.note("upload" if target else "download")


def _count_work(op: Any, name: str, args: Any, *, there: bool) -> None:
    """Count the work of the operation ``op``, called ``name``, other than copies: waits for a result that the CPU
    needs, uploads of indices (``there``: an argument is on the CPU), launches and allocations."""
    if name in _WAITING or (name == "repeat_interleave" and "Tensor" in str(op)):
        WORK.note("wait")
    elif name in _INDEXING:
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            WORK.note("wait")
        if there:
            WORK.note("upload")
    if name.startswith(("empty", "new_empty")):
        WORK.counts["allocation"] += 1
    elif name not in _WITHOUT_LAUNCH and name != "_local_scalar_dense":
        WORK.counts["launch"] += 1


def _host(value: Any) -> Any:
    """Return the CPU tensor inside of a tensor of the device; any other value is returned unchanged."""
    return value.host if isinstance(value, ClaimedTensor) else value


def _claim(value: Any) -> Any:
    """Return a tensor of the device that shares the memory of a CPU tensor; any other value is returned unchanged."""
    return ClaimedTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, ClaimedTensor) else value


def _line() -> str:
    """Return the innermost line of code outside of torch in the current call stack, as ``file:line``; ``?`` if there is
    none."""
    for frame in reversed(traceback.extract_stack(limit=80)):
        if frame.filename != __file__ and not any(part in frame.filename for part in _SKIPPED_FILES):
            return f"{frame.filename.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{frame.lineno}"
    return "?"


def allocated_bytes() -> int:
    """Return the memory of all tensors of the device in this process, in bytes. It is slow, because it inspects every
    object of the process."""
    storages = [each.host.untyped_storage() for each in gc.get_objects() if type(each) is ClaimedTensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Stream:
    """The replacement of ``torch.cuda.Stream``. Operations of the device are computed synchronously, so its methods do
    nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


def _without_gradient(mode: Any = True) -> Any:
    """The replacement of ``torch.inference_mode``, which does not support tensor subclasses: return
    ``torch.no_grad()``. ``mode`` may be a function to decorate; with false, gradients are enabled."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.enable_grad()


def _wait(device: Any = None) -> None:
    """Count a wait. This function replaces ``torch.cuda.synchronize``."""
    WORK.note("wait")


_LIBRARY: list[torch.library.Library] = []
"""The registrations of operations, which are valid as long as these objects exist."""


def claim() -> None:
    """Make torch use the device as the GPU ``cuda:0`` in this process: register :func:`compute` for all operations, and
    replace functions of ``torch.cuda``. The compiled library must have been loaded before torch."""
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
