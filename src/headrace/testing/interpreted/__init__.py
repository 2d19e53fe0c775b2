"""A vLLM whose kernels are interpreted. Only its newer model runner returns kept-sets and experts, and that is written
in Triton and needs a GPU; on a CPU Triton's own interpreter runs it, slowly, which is enough for a test."""

from __future__ import annotations

import shlex
from pathlib import Path

PATH = Path(__file__).parent / "path"
"""The folder that is added to the server's Python path; it has a ``sitecustomize`` module."""
_VARIABLES = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""The environment variables of the server."""


def interpreted(python: str, directory: Path) -> str:
    """Write a shell script into ``directory`` that starts the Python interpreter ``python``, which has vLLM, so that
    Triton kernels are interpreted. Return the script's path, to be used in place of ``python``."""
    program = directory / "python-that-interprets"
    variables = " ".join(f"{name}={value}" for name, value in _VARIABLES.items())
    lines = [
        "#!/bin/sh",
        f'{variables} PYTHONPATH="$PYTHONPATH:"{shlex.quote(str(PATH))} exec {shlex.quote(python)} "$@"',
    ]
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    program.chmod(0o700)
    return str(program)
