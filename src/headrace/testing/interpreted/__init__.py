"""A vLLM whose kernels are interpreted: its newer model runner, which alone tells kept-sets and experts, is written in
Triton and wants a GPU; on a processor Triton's own interpreter runs it, slowly, as a test needs it."""

from __future__ import annotations

import shlex
from pathlib import Path

PATH = Path(__file__).parent / "path"
_VARIABLES = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def interpreted(python: str, directory: Path) -> str:
    """A program in ``directory`` that is ``python``, and has what it runs interpret its kernels."""
    program = directory / "python-that-interprets"
    variables = " ".join(f"{name}={value}" for name, value in _VARIABLES.items())
    lines = [
        "#!/bin/sh",
        f'{variables} PYTHONPATH="$PYTHONPATH:"{shlex.quote(str(PATH))} exec {shlex.quote(python)} "$@"',
    ]
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    program.chmod(0o700)
    return str(program)
