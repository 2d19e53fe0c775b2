"""The checks of ``headrace bench gpu`` before its first stage, which refuse unusable options and unusable GPUs.

The facts about the GPU come from another process (:mod:`.probe`), since torch is not imported in the command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.base.environ import program_environment, secret, shared_memory_root
from headrace.base.errors import ConfigError
from headrace.learner.config import LearnerConfig
from headrace.learner.footprint import LearnerSizes, levers
from headrace.models.devices import has_gpu_driver
from headrace.models.shape import ModelShape
from headrace.wings.bench.gpu.base import GIB
from headrace.wings.bench.gpu.probe import CardFacts
from headrace.wings.bench.gpu.shapes import MEASURED, MODELS

PROBE = "headrace.wings.bench.gpu.probe"
LEAST_CAPABILITY = (8, 0)
"""The first compute capability with products in bfloat16 (Ampere)."""
C_COMPILERS = ("gcc", "clang", "cc")
"""The compilers that Triton tries for the program with which it launches kernels; ``CC`` names another."""
OTHERS_BYTES = 2 * GIB
"""The memory of the GPU that other processes may use when the command starts, such as the driver and a desktop."""
MODELS_BYTES = 50 * GIB
"""The disk space that the random models of all stages need."""
WITH_TRITON = frozenset({"kernels", "engine", "exact"})
"""The stages that need Triton."""
CACHE_BYTES = 6 * GIB
"""The memory that an engine of a stage needs for its cache and its activations, in addition to the weights."""
ENGINE_COPIES = {"engine": 1, "vllm": 1, "sync": 2}
"""The number of copies of the weights in the engine of a stage."""
LEARNER_TOKENS = {"learner": 4096, "sync": 64}
"""The number of tokens in a pass of the learner of a stage that trains the largest model with targets."""
ITEMSIZE = 2
"""The number of bytes of a weight in bfloat16."""
OFFLOAD = "learner.memory.offload_optimizer = true"


def refuse_options(*, budget: float, vllm: str, out: Path) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for values of the options that cannot be used: a ``budget`` of
    no time, an interpreter ``vllm`` that is no program, or a file ``out`` that cannot be written."""
    if budget <= 0:
        raise ConfigError(f"--budget {budget:g} is no time", remedy="give a number of seconds, such as 600")
    if vllm and not (Path(vllm).is_file() and os.access(vllm, os.X_OK)):
        raise ConfigError(f"--vllm {vllm!r} is no program", remedy="name a Python interpreter that has vLLM")
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(
            f"--out {out} cannot be written: it is a directory, or lies in none that exists",
            remedy="give a file in a directory that exists",
        )
    if out.exists():
        raise ConfigError(
            f"--out {out} exists, and a file of figures is not overwritten",
            remedy=f"give another name; --compare {out} compares with it",
        )


def model_folder() -> Path:
    """Return the folder for the random models of all stages: shared memory, or the usual folder for temporary files if
    shared memory has too little room. Raises :class:`~headrace.base.errors.ConfigError` if both have too little
    room."""
    folders = (shared_memory_root(), Path(tempfile.gettempdir()))
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    for folder in folders:
        if free[folder] >= MODELS_BYTES:
            return folder
    rooms = " and ".join(f"{room / GIB:.0f} GiB in {folder}" for folder, room in free.items())
    raise ConfigError(
        f"the random models of all stages take {MODELS_BYTES / GIB:.0f} GiB, and there are {rooms}",
        remedy="name a folder with more room in the variable TMPDIR; docker run --shm-size=64g",
    )


def query_card() -> CardFacts:
    """Return the facts about the GPU, which another process (:mod:`.probe`) reads. Raises
    :class:`~headrace.base.errors.ConfigError` if there is no driver, or if this process fails."""
    if not has_gpu_driver():
        raise ConfigError(
            "there is no driver for a GPU on this machine",
            remedy="run this on a machine with one; --pretend tries all stages without",
        )
    done = subprocess.run(
        [sys.executable, "-m", PROBE], env=program_environment({}), capture_output=True, check=False, timeout=120
    )
    if done.returncode:
        raise ConfigError(
            f"torch cannot be asked about the GPU: {done.stderr.decode(errors='replace').strip()[-500:]}",
            remedy="mend that first; headrace doctor says more",
        )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=CardFacts)


def refuse_card(card: CardFacts, stages: Sequence[str]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a GPU ``card``, or an installation, on which one of the
    ``stages`` would fail."""
    _refuse_driver(card)
    if card.capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"{card.name} has compute capability {card.capability[0]}.{card.capability[1]}, and bfloat16 needs "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}",
            remedy="take a card of Ampere or later (A100, L4, RTX 30, H100, ...)",
        )
    _refuse_taken(card)
    for stage in stages:
        _refuse_little_memory(card, stage, stages)
    if WITH_TRITON & set(stages):
        _refuse_without_triton(card)


def _refuse_driver(card: CardFacts) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a build of torch without CUDA, and for a driver that torch
    cannot use."""
    if not card.cuda:
        raise ConfigError(
            f"torch {card.torch} is built without CUDA",
            remedy="install the build that fits the driver: https://pytorch.org/get-started/locally",
        )
    if card.error or not card.count:
        raise ConfigError(
            f"torch {card.torch}, built for CUDA {card.cuda}, cannot use the GPU: {card.error or 'it sees none'}",
            remedy="look at nvidia-smi and CUDA_VISIBLE_DEVICES; if the driver is too old, update it or install the "
            "torch that fits it: https://pytorch.org/get-started/locally",
        )


def _refuse_taken(card: CardFacts) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if other processes use memory of the GPU, since they would
    distort all figures."""
    taken = card.total - card.free
    if taken > OTHERS_BYTES:
        raise ConfigError(
            f"other processes hold {taken / GIB:.1f} of {card.total / GIB:.1f} GiB of cuda:0 ({card.name})",
            remedy="end them (nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES",
        )


def _refuse_little_memory(card: CardFacts, stage: str, stages: Sequence[str]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the largest model with targets does not fit on the GPU
    ``card`` in ``stage``. The remedy names the other stages of ``stages`` that need less memory."""
    largest = max((MODELS[name].sizes for name in MEASURED), key=lambda sizes: sizes.params)
    needs = _needed_bytes(stage, largest)
    if needs <= card.total:
        return
    others = ",".join(name for name in stages if _needed_bytes(name, largest) < needs)
    more = ""
    if stage in LEARNER_TOKENS:
        freed = levers(_learner_sizes(stage, largest))[OFFLOAD]
        more = f"; in a run of your own {OFFLOAD} frees {freed / GIB:.0f} GiB"
    if stage == "sync":
        more += ", or give the engine a GPU of its own"
    raise ConfigError(
        f"stage {stage} needs {needs / GIB:.0f} GiB for {largest.name}, and {card.name} has {card.total / GIB:.0f}",
        remedy=f"--stages {others or 'facts'} leaves it out{more}",
    )


def _needed_bytes(stage: str, model: ModelShape) -> float:
    """Return the memory that ``stage`` needs on the GPU for ``model``: that of an engine, of a learner, or of both; 0
    for a stage that is not known to need much."""
    copies = ENGINE_COPIES.get(stage, 0)
    engine = copies * ITEMSIZE * model.params + CACHE_BYTES if copies else 0.0
    learner = _learner_sizes(stage, model).footprint().total_bytes if stage in LEARNER_TOKENS else 0.0
    return engine + learner


def _learner_sizes(stage: str, model: ModelShape) -> LearnerSizes:
    """Return the sizes and settings that determine the memory of the learner of ``stage``, which trains ``model``."""
    config = LearnerConfig(tokens_per_microbatch=LEARNER_TOKENS[stage])
    return LearnerSizes(shape=model, config=config, itemsize=ITEMSIZE)


def _refuse_without_triton(card: CardFacts) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for an installation that cannot compile and run Triton
    kernels."""
    if not card.triton:
        raise ConfigError("Triton is not installed, which the kernels need", remedy="pip install 'headrace[cuda]'")
    named = secret("CC")
    if not any(map(shutil.which, [named] if named else C_COMPILERS)):
        looked = f"CC={named!r}" if named else ", ".join(C_COMPILERS)
        raise ConfigError(
            f"no C compiler is installed ({looked}), with which Triton builds what launches its kernels",
            remedy="install one: apt install gcc; or name one in the variable CC",
        )
