"""The candidates for the weights of a server that is examined. A candidate is a directory on this machine, with a
precision and a rotary embedding, and computes its own logits of the tokens that were sent to the server. The candidate
whose logprobs agree with the server's shows which weights the server uses.

Shape legend: T tokens of a sequence, V vocabulary, E logprobs (entries) that a server returned.
"""

# gate: getattr - settings of the configuration differ from model to model

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.base.errors import HeadraceError
from headrace.models.attention import PackedPlan, forward
from headrace.models.config import ModelConfig
from headrace.models.load import load_model
from headrace.models.lora import CONFIG_FILE, read_lora_config
from headrace.models.rope import rope_types
from headrace.models.settings import read_config
from headrace.wings.doctor.report import Fault

THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 10_000_000.0)
"""The bases of rotary embeddings (theta) that common models use."""
MOST_OTHERS = 8
"""Largest number of other directories that are tried."""
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Logprobs that a server has returned, as columns. An entry is the logprob of one token id at one place of a
    sequence."""

    sequences: list[list[int]]
    """The tokens of each sequence."""
    sequence_E: npt.NDArray[np.int64]
    """The index of the entry's sequence in ``sequences``."""
    place_E: npt.NDArray[np.int64]
    """The index of the predicted token in the sequence, at least 1."""
    id_E: npt.NDArray[np.int64]
    """The id of the token whose logprob was returned: the token of the sequence, or another likely token."""
    logprob_E: npt.NDArray[np.float64]
    """The logprob in nats."""

    def __len__(self) -> int:
        """Return the number of entries E."""
        return len(self.id_E)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCandidate:
    """One combination of weights, precision and rotary embedding that a server may use. :meth:`logits` computes the
    logits of such a server."""

    words: str
    """Description of the candidate for the report."""
    fault: Fault | None
    """The fault of a server that uses this candidate; ``None`` for the expected candidate."""
    remedy: str
    """The remedy for a server that uses this candidate."""
    path: str
    """The directory of the base model."""
    adapter: str | None
    """The directory of the adapter; ``None``: no adapter."""
    precision: Precision
    """The precision of the weights."""
    rope: tuple[str, Any] | None = None
    """A changed parameter of the rotary embedding, as (name, value); ``("rope_type", "default")`` removes all scaling.
    ``None``: the parameters of the model."""

    def logits(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        """Load the candidate's model, and return its logits ``[T, V]`` for each of ``sequences`` of T token ids, in
        float32."""
        with _with_changed_rope(self.path, self.rope) as path:
            lora = None if self.adapter is None else read_lora_config(Path(self.adapter))
            dtype: Literal["float32", "bfloat16"] = "bfloat16" if self.precision == "bfloat16" else "float32"
            model = load_model(ModelConfig(path=path, dtype=dtype, lora=lora))
        if self.precision == "float16":  # only the weights are rounded: processors compute in float32
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.half().float())
        sequence_logits = []
        with torch.no_grad():
            for ids in sequences:
                sequence_logits.append(forward(model, torch.tensor(ids), PackedPlan([len(ids)])).float())
        return sequence_logits


@contextmanager
def _with_changed_rope(path: str, rope: tuple[str, Any] | None) -> Iterator[str]:
    """Yield the directory of the model in ``path`` with the parameter ``rope`` (name, value) of its rotary embedding
    changed: a temporary directory of symbolic links with another ``config.json``. Yield ``path`` itself if ``rope`` is
    ``None``."""
    if rope is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="headrace-doctor-") as copy:
        for file in Path(path).iterdir():
            if file.name != "config.json":
                (Path(copy) / file.name).symlink_to(file.resolve())
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        name, value = rope
        (encoded,) = {json.dumps(each) for _, each in rope_types(read_config(path))}
        parameters = json.loads(encoded)
        if name == "rope_type":
            parameters = {"rope_theta": parameters.get("rope_theta")}
        config.pop("rope_scaling", None)
        config.pop("rope_theta", None)
        config["rope_parameters"] = {"rope_type": "default", **parameters, name: value}
        (Path(copy) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The weights that a server should use, and further directories whose weights it may use instead."""

    path: str
    """The directory of the base model."""
    adapter: str | None
    """The directory of the adapter that should be applied; ``None``: no adapter."""
    precision: Precision
    """The precision of the weights."""
    others: tuple[Path, ...] = ()
    """Further directories, named by the user, whose weights the server may use instead."""

    def candidate(self, words: str, fault: Fault | None = None, remedy: str = "", **changes: Any) -> ServedCandidate:
        """Return the expected weights as a candidate, with ``changes`` to its fields. ``words`` describe the candidate;
        ``fault`` and ``remedy`` are those of a server that uses it."""
        own: dict[str, Any] = {"path": self.path, "adapter": self.adapter, "precision": self.precision}
        return ServedCandidate(words=words, fault=fault, remedy=remedy, **{**own, **changes})


def make_expectation(
    directory: Path, adapter: Path | None, precision: Precision | Literal["auto"], others: Sequence[Path]
) -> Expected:
    """Return the expected weights of a server of the model in ``directory``, with the adapter in the directory
    ``adapter`` (``None``: no adapter). If ``directory`` contains an adapter, the base model is the model that the
    adapter's configuration names. The precision ``auto`` stands for the precision of the files. ``others`` are
    directories whose weights the server may use instead."""
    base = directory
    if adapter is None and (directory / CONFIG_FILE).is_file():
        adapter = directory
        base = Path(json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"])
    chosen = precision if precision != "auto" else _read_stored_precision(str(base))
    return Expected(
        path=str(base), adapter=None if adapter is None else str(adapter), precision=chosen, others=tuple(others)
    )  # fmt: skip


def _read_stored_precision(path: str) -> Precision:
    """Return the precision in the ``config.json`` of the model in ``path``; float32 if the file contains none."""
    stored = str(getattr(read_config(path), "dtype", None) or "float32").removeprefix("torch.")
    half: dict[str, Precision] = {"bfloat16": "bfloat16", "float16": "float16"}
    return half.get(stored, "float32")


def list_alternatives(expected: Expected) -> Iterator[ServedCandidate]:
    """Yield the candidates that differ from the expected weights, likely candidates first: without the adapter, other
    directories, other precisions, other rotary embeddings."""
    if expected.adapter is not None:
        yield expected.candidate(
            "the base model without the adapter", Fault.ADAPTER_NOT_APPLIED,
            "load the adapter, and send its name as the model", adapter=None,
        )  # fmt: skip
    yield from _list_other_directories(expected)
    for precision in ("bfloat16", "float16", "float32"):
        if precision != expected.precision:
            yield expected.candidate(
                f"the same weights in {precision}, not {expected.precision}", Fault.PRECISION,
                f"start the server in {expected.precision} (--dtype), or know the rounding", precision=precision,
            )  # fmt: skip
    yield from _list_other_ropes(expected)


def _list_other_directories(expected: Expected) -> Iterator[ServedCandidate]:
    """Yield candidates with other weights: first the directories that the user has named, then the directories in the
    parent of the expected directory, such as other snapshots of its run."""
    own = Path(expected.adapter or expected.path).resolve()
    beside: list[Path] = []
    with suppress(OSError):
        beside = sorted(
            (each for each in own.parent.iterdir() if each.is_dir() and each.resolve() != own), reverse=True
        )
    named = [each for each in expected.others if each.resolve() != own]
    usable = [each for each in dict.fromkeys([*named, *beside]) if _has_weights(each)]
    usable.sort(key=lambda each: each not in named)
    for directory in usable[:MOST_OTHERS]:
        adapted = (directory / CONFIG_FILE).is_file()
        if adapted and expected.adapter is None:
            continue
        where = {"adapter": str(directory)} if adapted else {"path": str(directory), "adapter": None}
        same_run = directory.parent.resolve() == own.parent and _is_step(directory) and _is_step(own)
        fault = Fault.OTHER_ADAPTER if adapted else Fault.OTHER_WEIGHTS
        yield expected.candidate(
            f"{'the adapter of ' if adapted else ''}{directory}",
            Fault.STALE_VERSION if same_run else fault,
            "publish again, and see that the server has loaded it before it answers"
            if same_run
            else f"start the server with {own}",
            **where,
        )


def _is_step(directory: Path) -> bool:
    """Return whether a directory has the name of a run's snapshot."""
    return directory.name.startswith("step-")


def _has_weights(directory: Path) -> bool:
    """Return whether a directory contains a model or an adapter."""
    if (directory / CONFIG_FILE).is_file():
        return True
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def _list_other_ropes(expected: Expected) -> Iterator[ServedCandidate]:
    """Yield candidates with the same weights and other parameters of the rotary embedding, if the model of ``expected``
    has the same rotary embedding in all layers."""
    try:
        found = list(rope_types(read_config(expected.path)))
    except HeadraceError:
        return
    if len(found) != 1:
        return
    kind, parameters = found[0]
    theta = parameters.get("rope_theta")
    changes: list[tuple[str, Any]] = [("rope_theta", other) for other in THETAS if theta is not None and other != theta]
    if kind != "default":
        changes.insert(0, ("rope_type", "default"))
    for name, value in changes:
        own = kind if name == "rope_type" else theta
        yield expected.candidate(
            f"the same weights with {name}={value}, not {own}", Fault.OTHER_ROPE,
            "look at rope_parameters (rope_theta, rope_scaling) of the config.json that the server has read",
            rope=(name, value),
        )  # fmt: skip


def compute_entry_logprobs(
    logits: Sequence[Tensor], entries: Entries, *, scale: float = 1.0, size: int | None = None
) -> Any:
    """Return the logprob of each of ``entries`` (float64, shape [E]) under ``logits``, a tensor ``[T, V]`` for each
    sequence. The logits are first multiplied by ``scale`` (1 / temperature). Only the first ``size`` ids of the
    vocabulary have a probability (``None``: all ids); the logprob of other ids is minus infinity."""
    found_E = np.full(len(entries), -np.inf)
    for number, each in enumerate(logits):
        own_entries = np.flatnonzero(entries.sequence_E == number)
        if not len(own_entries):
            continue
        # several entries share a place, whose log-softmax is computed once
        places, row_E = np.unique(entries.place_E[own_entries] - 1, return_inverse=True)
        logprobs = (each[torch.from_numpy(places)].double() * scale)[:, :size].log_softmax(-1)
        ids = torch.from_numpy(entries.id_E[own_entries])
        is_known = ids < logprobs.shape[1]
        values = logprobs[torch.from_numpy(row_E), ids.clamp(max=logprobs.shape[1] - 1)].masked_fill(
            ~is_known, -torch.inf
        )
        found_E[own_entries] = values.numpy()
    return found_E
