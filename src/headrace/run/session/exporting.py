"""``headrace export``: write trained weights as plain files that any Hugging Face program loads.

run ──▶ its newest complete checkpoint ┬─ a model: its files, byte for byte; for the text part of a multimodal
                                       │  checkpoint, the files of the whole checkpoint with the trained text part
checkpoint, or a saved policy ─────────┘─ an adapter: merged into its base model, or as separate files for peft; one
                                          agent's adapter, if agents have trained adapters of their own
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from safetensors import SafetensorError

from headrace.base.errors import CheckpointError, ConfigError, nearest
from headrace.control.saving import CHECKPOINTS
from headrace.flow.ledger.opening import LOCK_FILE
from headrace.learner import checkpoint
from headrace.learner.checkpoint.snapshot import STATE_FILE
from headrace.learner.disk import SLACK_BYTES, TOKENIZER_FILES, flush_one, verify, whole_or_nothing
from headrace.models.config import AGENTS, WHOLE, ModelConfig
from headrace.models.hub import is_hub_name, local_directory
from headrace.rollout.environments.agents import POLICY

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The names of the files of a LoRA adapter, which the library peft defines."""
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
"""Patterns of the files in a checkpoint that are exported, in addition to the tokenizer's files. The optimizer's files
are not exported."""

AdapterForm = Literal["merged", "separate"]
"""The form in which an adapter is exported: merged into its base model, or as files of its own."""
NumberFormat = Literal["float32", "bfloat16"]
"""The number format of a merged model."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export, for the user and for programs (``--json``)."""

    source: str
    """The directory of the checkpoint, or of the agent's adapter in it, that was exported."""
    directory: str
    """The new directory with the exported files."""
    kind: Literal["model", "merged adapter", "adapter"]
    """The kind of the exported weights."""
    agent: str = ""
    """The agent whose adapter was exported; empty for the policy's adapter."""
    whole: str = ""
    """The multimodal checkpoint from which all other weights were copied, if its text part was trained; empty for
    models of text alone."""
    lost_share: float | None = None
    """The fraction of the weights changed by the adapter that are equal to the base's again after rounding to the
    number format; ``None`` if nothing was merged."""


def export(
    weights: Path, out: Path, adapter: AdapterForm | None = None, dtype: NumberFormat | None = None, agent: str = ""
) -> Exported:
    """Write the weights of the run or checkpoint in the directory ``weights`` into the new directory ``out``, which
    appears complete or not at all.

    ``adapter`` is the form of an adapter; ``None`` means merged. ``dtype`` is the number format of a merged model;
    ``None`` means float32. ``agent`` names the agent whose adapter is exported, if agents have trained adapters of
    their own; ``policy`` selects the policy's adapter.

    Raises :class:`~headrace.base.errors.ConfigError` if there are no such weights, and if ``out`` exists already;
    :class:`~headrace.base.errors.CheckpointError` if ``out`` cannot be written; and
    :class:`~headrace.base.errors.ModelError` if the adapter's base model is missing.
    """
    out = out.expanduser().absolute()
    while True:
        checkpoint_dir = _find_source(weights)
        try:
            return _export(checkpoint_dir, out, adapter, dtype, agent)
        except CheckpointError:
            if checkpoint_dir.is_dir():  # otherwise the run has replaced the checkpoint by a newer one: export that
                raise


def _export(
    checkpoint_dir: Path, out: Path, adapter: AdapterForm | None, dtype: NumberFormat | None, agent: str
) -> Exported:
    """Write the weights of the checkpoint ``checkpoint_dir`` to the new directory ``out``, completely or not at all,
    and return the description of the export. :func:`export` describes the other parameters and the errors."""
    source = _find_adapter_directory(checkpoint_dir, agent)
    adapted = (source / ADAPTER_FILES[0]).is_file()
    _refuse_unused(source, adapted, adapter, dtype)
    unfinished = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError("it is there already")
        shutil.rmtree(unfinished, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}", remedy="name a directory that does not exist") from None
    lost_share, whole = None, ""
    try:
        if adapted and adapter != "separate":
            lost_share = _merge(source, unfinished, dtype or "float32")
        elif not adapted and (whole := _read_multimodal_checkpoint(source)):
            _write_multimodal(source, whole, unfinished)
        else:
            files = [path for pattern in (ADAPTER_FILES if adapted else MODEL_FILES) for path in source.glob(pattern)]
            files += [path for name in TOKENIZER_FILES for path in checkpoint_dir.glob(name)]
            _copy_files(files, unfinished)
        unfinished.replace(out)
        flush_one(out.parent)
    except (OSError, SafetensorError) as error:
        remedy = f"make room at {out.parent} (df -h), or name another directory"
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"look whether {checkpoint_dir} can be read and {out.parent} be written"
        raise CheckpointError(f"{out} cannot be written: {error}", remedy=remedy) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    kind: Literal["model", "merged adapter", "adapter"] = "model"
    if adapted:
        kind = "adapter" if lost_share is None else "merged adapter"
    exported_agent = "" if agent == POLICY else agent
    return Exported(
        source=str(source), directory=str(out), kind=kind, agent=exported_agent, whole=whole, lost_share=lost_share
    )


def _find_adapter_directory(source: Path, agent: str) -> Path:
    """Return the directory below the checkpoint ``source`` with the adapter of ``agent``; ``source`` itself for the
    policy's adapter (``agent`` is ``policy``) and if agents have no adapters (``agent`` is empty). Raises
    :class:`~headrace.base.errors.ConfigError` for an unknown agent, and for no agent if there are several adapters."""
    agents = sorted(path.name for path in (source / AGENTS).glob("*"))
    choices = [POLICY, *agents] if agents else []
    if choices and not agent:
        raise ConfigError(
            f"{source} holds an adapter for each of {', '.join(choices)}", remedy=f"say which: --agent {agents[0]}"
        )
    if agent and agent not in choices:
        if not choices:
            raise ConfigError(f"--agent {agent}: {source} holds no adapters of agents", remedy="leave --agent out")
        raise ConfigError(f"--agent {agent}: {source} holds none of that name", remedy=nearest(agent, choices))
    return source / AGENTS / agent if agent in agents else source


def _find_source(path: Path) -> Path:
    """Return the directory of the weights to export: the newest complete checkpoint if ``path`` is the directory of a
    run, or ``path`` itself, after a check of its files, if it is a checkpoint or a saved policy. Raises
    :class:`~headrace.base.errors.ConfigError` if there are no weights."""
    source = path.expanduser().absolute()
    if (source / CHECKPOINTS).is_dir() or (source / LOCK_FILE).is_file():
        snapshot = checkpoint.newest_weights(source / CHECKPOINTS)
        if snapshot is None:
            raise ConfigError(f"the run {path} has no whole checkpoint yet", remedy="let it reach its first one")
        return snapshot
    if not any(source.glob("*.safetensors")):
        raise ConfigError(
            f"{path} is neither a run nor a checkpoint",
            remedy="name the directory of a run, of one of its checkpoints, or of a saved policy",
        )
    if (source / STATE_FILE).is_file():
        checkpoint.read_state(source, to_resume=False)  # refuses a checkpoint that is not complete
    else:
        verify(source)
    return source


def _refuse_unused(source: Path, adapted: bool, adapter: AdapterForm | None, dtype: NumberFormat | None) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for an option of the user, ``--adapter`` or ``--dtype``, that
    would have no effect on the weights in ``source``. ``adapted`` is true if these are an adapter; ``adapter`` and
    ``dtype`` are the values of the options."""
    if adapter is not None and not adapted:
        raise ConfigError(
            f"--adapter {adapter}: {source} holds a whole model and no adapter", remedy="leave --adapter out"
        )
    if dtype is not None and (not adapted or adapter == "separate"):
        raise ConfigError(
            f"--dtype {dtype}: nothing is merged, files are copied as they are",
            remedy="leave --dtype out, and give dtype to from_pretrained when you load them",
        )


def _merge(source: Path, out: Path, dtype: NumberFormat) -> float:
    """Merge the adapter in ``source`` into its base model, and write the model into ``out`` in the number format
    ``dtype``. Return the fraction of the weights changed by the adapter that are equal to the base's again after
    rounding to ``dtype``."""
    from headrace.models.lora import read_adapter
    from headrace.models.merge import export_merged

    tree, _ = read_adapter(source)
    name, revision = tree["base_model_name_or_path"], tree.get("revision")
    base = local_directory(f"{name}@{revision}" if revision and is_hub_name(name) else name, "the adapter's base")
    return export_merged(Path(base), source, out, dtype).lost_share


def _read_multimodal_checkpoint(source: Path) -> str:
    """Return the path or hub name, from the configuration of the model in ``source``, of the multimodal checkpoint to
    which the model belongs as its text part; empty for a model of text alone."""
    return str(json.loads((source / "config.json").read_text(encoding="utf-8")).get(WHOLE, ""))


def _read_number_format(source: Path) -> NumberFormat:
    """Return the number format of the weights in ``source``: ``bfloat16`` if the configuration there names it, else
    ``float32``."""
    tree = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return "bfloat16" if tree.get("dtype") == "bfloat16" else "float32"


def _write_multimodal(source: Path, whole: str, out: Path) -> None:
    """Write the multimodal checkpoint ``whole`` with the text part in ``source`` into the new directory ``out``."""
    from headrace.models.load import load_model
    from headrace.models.text_part import write_whole

    base = Path(local_directory(whole, "the multimodal checkpoint"))
    text = load_model(ModelConfig(path=str(source), dtype=_read_number_format(source)))
    needed = sum(path.stat().st_size for path in base.iterdir()) + 2 * sum(each.nbytes for each in text.parameters())
    out.mkdir()
    with whole_or_nothing(out, needed + SLACK_BYTES):
        write_whole(base, text, out)


def _copy_files(paths: Iterable[Path], out: Path) -> None:
    """Create the directory ``out``, and copy the files at ``paths`` into it. If they do not fit on the disk, the
    directory is removed, and :class:`~headrace.base.errors.CheckpointError` is raised."""
    files = sorted(set(paths))
    out.mkdir()
    with whole_or_nothing(out, sum(path.stat().st_size for path in files) + SLACK_BYTES):
        for path in files:
            shutil.copyfile(path, out / path.name)
