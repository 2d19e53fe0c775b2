"""Install the package into the Python that runs this file, and show the progress: ``python tools/install.py dev``.

The arguments are the extras to install. Only the standard library is imported, since nothing else is there yet.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEARTBEAT_S = 5.0
"""Longest time without a line of output, in seconds."""
PROBE_TIMEOUT_S = 30.0
"""Seconds after which an index counts as unreachable; pip waits five seconds for each connection."""
WITHOUT_REQUIREMENTS = "tinker-cookbook"
"""The package that `dev` gets without what it requires, a part of which is on no index; the recipes of the tests need
the rest, which pyproject.toml names."""
SIGNS_OF_NVIDIA = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/usr/lib/wsl/lib/nvidia-smi")

_WHEEL = re.compile(
    r"(?:Downloading|Using cached|Processing) (?:\S*/)?(?P<name>[\w.]+)-(?P<version>[\w.+!%]+)-\S*\.whl"
)
_SOURCE = re.compile(r"(?:Downloading|Using cached) (?:\S*/)?(?P<name>[\w.-]+)-(?P<version>[\w.+!%]+)\.(?:tar\.gz|zip)")
_SIZE = re.compile(r"\(([\d.]+ [kMG]?B)\)")


class Progress:
    """A converter of pip's output into one line per package, with a heartbeat while pip prints nothing."""

    def __init__(self) -> None:
        self.activity = "asking the package index"
        """What pip is doing, for the heartbeat."""
        self._collected: set[str] = set()
        """The names of the packages that pip has resolved."""
        self._named: set[str] = set()
        """Name and version of the packages that have been printed."""
        self._silent = True
        """True if nothing has been printed since the last heartbeat."""
        self._beats = 0
        """The number of heartbeats so far."""

    def read(self, line: str) -> None:
        """Process ``line``, one line of pip's output."""
        words = line.split()
        if words[:1] == ["Collecting"]:
            self._collected.add(re.split(r"[^\w.-]", words[1])[0])
            self.activity = f"resolving: {len(self._collected)} packages so far"
        elif words[:2] == ["Building", "wheel"] and "done" not in words and "finished" not in words:
            self._print(f"  building {words[3]}")
        elif words[:3] == ["Installing", "collected", "packages:"]:
            self.activity = f"unpacking {len(words) - 3} packages"
            self._print(f"  {self.activity}")
        elif (match := _WHEEL.match(line.strip()) or _SOURCE.match(line.strip())) and ".whl.metadata" not in line:
            self._package(match["name"], match["version"], line)

    def beat(self) -> None:
        """Print what pip is doing, if nothing has been printed since the last call."""
        self._beats += 1
        if self._silent:
            print(f"  … {self.activity} ({self._beats * HEARTBEAT_S:.0f} s)", flush=True)
        self._silent = True

    def _package(self, name: str, version: str, line: str) -> None:
        key = f"{name} {unquote(version)}"
        if key in self._named:
            return
        self._named.add(key)
        size = _SIZE.search(line)
        self.activity = f"{len(self._named)} packages so far, the last {key}"
        self._print(f"  {key}{f'  {size[1]}' if size else ''}")

    def _print(self, text: str) -> None:
        self._silent = False
        print(text, flush=True)


@contextmanager
def print_heartbeats(progress: Progress) -> Iterator[None]:
    """Print heartbeats of ``progress`` from a separate thread while the body runs."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            progress.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def pip(*arguments: str, log: Path) -> int:
    """Run pip with one line per package, append all its output to ``log``, and return its exit status."""
    command = [sys.executable, "-m", "pip", *arguments]
    progress = Progress()
    lines = []
    with log.open("a", encoding="utf-8") as log_file, print_heartbeats(progress):
        log_file.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log_file.write(line)
                lines.append(line)
                progress.read(line)
    if process.returncode:
        lines = [line for line in lines if not line.startswith("Requirement already satisfied")]
        print("".join(lines[-60:]), file=sys.stderr)
        print(f"pip failed with exit status {process.returncode}; its whole output is in {log}", file=sys.stderr)
    return process.returncode


def pinned_version(name: str) -> str:
    """Return the version of the package ``name`` in the constraints file."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))


def installed_version(name: str) -> str:
    """Return the version of the package ``name`` in this environment; empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def has_nvidia_gpu() -> bool:
    """Return whether the driver of an NVIDIA GPU is present."""
    return bool(shutil.which("nvidia-smi")) or any(Path(sign).exists() for sign in SIGNS_OF_NVIDIA)


def has_build(index: str, version: str) -> tuple[bool, str]:
    """Return whether pip finds the build ``version`` of torch for this Python in that index, and otherwise the
    reason."""
    options = ["--index-url", index, "--retries", "0", "--timeout", "5", "--disable-pip-version-check"]
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "pip", "index", "versions", "torch", *options],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"it did not answer within {PROBE_TIMEOUT_S:.0f} s"
    available = re.findall(r"^Available versions: (.*)$", answer.stdout, re.MULTILINE)
    if version in " ".join(available).split(", "):
        return True, ""
    if available:
        return False, f"it has no torch {version} for this Python and machine"
    return False, "it could not be reached, or has no torch for this Python and machine"


def install_torch(build: str, log: Path) -> int:
    """Install the build of torch that ``build`` selects, unless it is the one that pip selects by itself. pip's output
    is appended to ``log``, and its exit status is returned."""
    version = pinned_version("torch")
    if build == "default" or installed_version("torch").partition("+")[0] == version:
        return 0
    if build == "auto":
        if sys.platform != "linux" or has_nvidia_gpu():
            return 0
        print(f"No NVIDIA GPU here: looking for torch's CPU build at {CPU_INDEX}", flush=True)
        offered, reason = has_build(CPU_INDEX, f"{version}+cpu")
        if not offered:
            print(
                f"It cannot be had: {reason}. torch's default build is taken, which brings CUDA libraries of some "
                "gigabytes; `make venv TORCH=URL` names another index.",
                flush=True,
            )
            return 0
        version = f"{version}+cpu"
    index = CPU_INDEX if build in {"auto", "cpu"} else build
    return pip("install", "--no-deps", "--disable-pip-version-check", "--progress-bar", "off",
               "--index-url", index, f"torch=={version}", log=log)  # fmt: skip


def can_compile() -> bool:
    """Return whether a C extension for this Python can be compiled."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return bool(shutil.which(compiler)) and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def choose_extras(extras: list[str]) -> list[str]:
    """Return the extras to install; those for tests that need a compiler only if there is one."""
    if "dev" not in extras or "reasoning-gym" in extras:
        return extras
    if can_compile() or installed_version("reasoning-gym"):
        return [*extras, "reasoning-gym"]
    print(
        "Without a C compiler and Python's headers (apt-get install gcc python3-dev) reasoning-gym cannot be built: "
        "it is left out, and its tests are skipped.",
        flush=True,
    )
    return extras


def install_package(extras: list[str], log: Path) -> int:
    """Install this package with extras, and for developers the one that is installed without its requirements. pip's
    output is appended to ``log``, and its exit status is returned."""
    options = ["--disable-pip-version-check", "--progress-bar", "off"]
    target = f".[{','.join(extras)}]" if extras else "."
    failed = pip("install", *options, "-c", str(CONSTRAINTS), "-e", target, log=log)
    wanted = f"{WITHOUT_REQUIREMENTS}=={pinned_version(WITHOUT_REQUIREMENTS)}"
    if not failed and "dev" in extras and pip("install", *options, "--no-deps", wanted, log=log):
        print(f"{wanted} cannot be had: the tests of its recipes are skipped.", flush=True)
    return failed


def main() -> int:
    """Install torch first, so that pip finds it in place, and then everything else."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extras", nargs="*", help="extras of the package, such as dev")
    parser.add_argument(
        "--torch", default="auto", help="auto, cpu, default (what pip takes by itself), or the URL of an index"
    )
    options = parser.parse_args()
    log = Path(sys.prefix) / "install.log"
    log.unlink(missing_ok=True)
    extras = choose_extras(options.extras)
    words = f" with {', '.join(extras)}" if extras else ""
    print(f"Installing headrace{words} for Python {sys.version.split()[0]}; the log is {log}", flush=True)
    failed = install_torch(options.torch, log) or install_package(extras, log)
    if not failed:
        print(f"Installed, with torch {installed_version('torch')}.", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
