"""A vLLM whose Triton kernels run in Triton's interpreter on the CPU. Kept-sets and experts are returned only by vLLM's
newer model runner, which is written in Triton and needs a GPU. The interpreter runs it on a CPU, slowly, but fast
enough for a test."""

from __future__ import annotations

import shlex
from pathlib import Path

PATH = Path(__file__).parent / "path"
"""The folder that is added to the server's Python path. It contains a module ``sitecustomize``, which Python imports
when the server starts."""
_VARIABLES = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""The environment variables of the server."""


def write_interpreter(python: str, directory: Path) -> str:
    """Write a shell script to ``directory`` that starts the Python interpreter ``python``, in which vLLM is installed,
    with Triton kernels interpreted. Return the path of the script, which is used in place of ``python``."""
    program = directory / "python-that-interprets"
    variables = " ".join(f"{name}={value}" for name, value in _VARIABLES.items())
    lines = [
        "#!/bin/sh",
        f'{variables} PYTHONPATH="$PYTHONPATH:"{shlex.quote(str(PATH))} exec {shlex.quote(python)} "$@"',
    ]
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    program.chmod(0o700)
    return str(program)
