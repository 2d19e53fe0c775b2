"""The claimed device: a simulated GPU. In a process that is started with the environment of :func:`device_environment`,
torch uses it as the GPU ``cuda:0``; its tensors are in host memory, and torch's CPU kernels compute the operations.

It checks without a GPU that a program never mixes devices and that it computes the same results as on a CPU. It also
counts the work that a GPU would have to do: uploads, downloads, waits and launches (:mod:`.device`).

    device_environment() ──▶ a process ──▶ path/sitecustomize.py waits for torch ──▶ device.cpp, before torch asks
                                                                                     ──▶ device.claim(), after it

It needs a build of torch without CUDA, and a C++ compiler. GPU kernels cannot run on it.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from headrace.base.errors import EnvError

PATH = Path(__file__).parent / "path"
"""The folder that is added to the Python path of a process. It contains a module ``sitecustomize``, which Python
imports when the process starts."""
LIBRARY = "HEADRACE_CLAIMED_DEVICE"
"""The name of the environment variable with the path of the compiled library."""
_SOURCE = Path(__file__).parent / "device.cpp"


def device_environment(directory: Path) -> dict[str, str]:
    """Compile the device to a library in ``directory``, unless the library exists. Return the environment variables
    with which a Python process, and every process that it starts, has the device.

    Raises :class:`~headrace.base.errors.EnvError` if it cannot be compiled.
    """
    library = directory / "device.so"
    if not library.exists():
        _compile(library)
    return {LIBRARY: str(library), "PYTHONPATH": str(PATH)}


def _compile(library: Path) -> None:
    """Compile ``device.cpp`` against the installed torch to the shared library ``library``. Raises
    :class:`~headrace.base.errors.EnvError` if there is no compiler or the compilation fails."""
    from headrace.models.kernels.build import INSTALL, NO_COMPILER, find_compiler

    compiler = find_compiler()
    if compiler is None:
        raise EnvError(NO_COMPILER, remedy=INSTALL)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    command = [
        compiler, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch}/include", str(_SOURCE), "-o", str(library),
        f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvError(
            f"the claimed device cannot be compiled: {done.stderr.strip()[-500:]}",
            remedy="mend that; this torch may have other headers",
        )
