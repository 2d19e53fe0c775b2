"""The stage ``vllm``: the native engine compared with vLLM, with the same weights and requests, one after the other.
The interpreter that ``--vllm`` names runs vLLM, and needs no Headrace."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.environ import program_environment
from headrace.base.errors import ComponentDied
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.wings.bench.base import at_least
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.bench.gpu.engines import Load, open_engine
from headrace.wings.bench.gpu.shapes import MEASURED, SMALL, find_model, write_model

PROGRAM = Path(__file__).with_name("vllm_side.py")
LOAD = Load(sequences=256, prompt=896, new=256)
"""The requests of the comparison."""
TINY = Load(sequences=3, prompt=12, new=4)
"""The requests with ``--pretend``."""
NEEDS_S = 45.0
"""The duration of the measurement of one model on a fast GPU, with vLLM's start, in seconds."""
FAIR = 1.0
"""The target ratio of our tokens per second to vLLM's."""


def run(stage: StageContext) -> None:
    """Compare the two engines on each model of :data:`~.shapes.MEASURED`. ``stage`` records the results."""
    if not stage.request.vllm:
        stage.add_row(what="vLLM beside it", left_out="no interpreter with vLLM was given: --vllm PYTHON")
        return
    for name in MEASURED if not stage.pretend else (SMALL,):
        load = TINY if stage.pretend else LOAD
        stage.attempt(f"{name} in both", partial(_compare, stage, name, load), needs_s=NEEDS_S)


def _compare(stage: StageContext, name: str, load: Load) -> None:
    """Send the same requests to both engines with the model ``name``, and record the tokens per second of whole
    requests."""
    dtype = "float32" if stage.pretend else "bfloat16"
    folder = write_model(stage, name, dtype)
    vocab = find_model(name, pretend=stage.pretend).settings["vocab_size"]
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, vocab, (load.sequences, load.prompt)).tolist()
    ours = _measure_native(stage, folder, dtype, load, prompts)
    stage.release()
    theirs = _measure_vllm(stage, folder, dtype, load, prompts)
    stage.add_row(what=f"{name}, {load.sequences} x {load.prompt} + {load.new}", ours_tok_s=ours, **theirs)
    ratio = ours / theirs["tok_s"]
    stage.add_target(at_least(f"engine, {name}: tok/s by vLLM's", ratio, FAIR, "ratio"), measured=True)


def _measure_native(stage: StageContext, folder: Path, dtype: str, load: Load, prompts: list[list[int]]) -> float:
    """Return the tokens per second of the native engine for ``prompts``, after it has answered them once as a warm-up.
    ``folder`` has the model, ``dtype`` is its number format, ``load`` has the sizes, and ``stage`` measures the
    time."""
    engine = open_engine(stage, folder, dtype, load)

    def answer(first: int) -> None:
        """Sample the answers to all prompts; the requests are numbered from ``first``."""
        for number, prompt in enumerate(prompts):
            sampling = Sampling(max_new_tokens=load.new, seed=number)
            ids_T = np.array(prompt, np.int32)
            engine.add(GenerateRequest(request_id=first + number, prompt_ids_T=ids_T, sampling=sampling))
        while engine.has_work():
            engine.step()

    answer(0)
    return load.sequences * load.new / stage.measure_s(lambda: answer(load.sequences))


def _measure_vllm(
    stage: StageContext, folder: Path, dtype: str, load: Load, prompts: list[list[int]]
) -> dict[str, Any]:
    """Return the figures of vLLM for ``prompts``: tokens per second and its version. ``folder`` has the model,
    ``dtype`` is its number format, and ``load`` has the sizes; files are written into the directory of ``stage``.
    Raises :class:`~headrace.base.errors.ComponentDied` if vLLM fails."""
    spec = {
        "model": str(folder), "dtype": dtype, "context": load.context, "sequences": load.sequences, "new": load.new,
        "prompts": prompts,
    }  # fmt: skip
    file = stage.directory / "vllm.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    # another interpreter, which must not load the claimed device from PYTHONPATH
    variables = {"PYTHONPATH": "", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [stage.request.vllm, "-P", str(PROGRAM), str(file)], env=program_environment(variables), capture_output=True,
        text=True, check=False, timeout=max(1.0, stage.left_s()),
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"tok_s"')]
    if done.returncode or not answers:
        raise ComponentDied(
            f"vLLM ended with exit code {done.returncode}: {done.stderr.strip()[-800:]}",
            remedy="try the interpreter of --vllm by itself, or leave --vllm out",
        )
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer
