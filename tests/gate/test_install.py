"""What ``make venv`` installs can be resolved on each Python and platform, with torch's default build."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import install

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    re.sub(r"[-_.]+", "-", name).lower(): version
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    if not name.startswith("#")
}
BROUGHT_BY_TORCH = re.compile(r"triton|nvidia-.*|cuda-.*|setuptools|pytorch-triton.*")
"""What torch's CUDA build requires in exact versions of its own, and its CPU build does not require at all."""
PYTHONS = ("3.11", "3.12", "3.13")
"""3.11 means 3.11.0: Debian 12 has 3.11.2."""
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31", "aarch64-apple-darwin")
"""glibc 2.31 (Ubuntu 20.04, Debian 11) is the oldest with wheels of all that the developers' tools need: those of
llguidance 1.7 and later begin there. The package itself also installs where glibc is 2.28."""
OLD_GLIBC = "x86_64-manylinux_2_28"
OUTSIDE = {"verifiers", "openenv", "trackio"}
"""Extras that want older versions of what the constraints pin; each is tested in an environment of its own."""
FROM_SOURCE = {"cellpylib", "chess", "pycosat", "zss"}
"""Packages without a wheel; of these pycosat alone needs a compiler, and comes with reasoning-gym."""


def test_constraints_leave_to_torch_what_its_builds_require_exactly() -> None:
    assert [name for name in PINS if BROUGHT_BY_TORCH.fullmatch(name)] == []


def test_pinned_versions_allow_the_oldest_python() -> None:
    """Of what is installed here; :func:`test_each_python_and_platform_resolves` asks the index about everything."""
    installed = {
        re.sub(r"[-_.]+", "-", each.name).lower(): each.metadata for each in importlib.metadata.distributions()
    }
    pinned = {name for name in PINS.keys() & installed if installed[name]["Version"].partition("+")[0] == PINS[name]}
    newer = re.compile(r">=\s*3\.(1[2-9]|11\.[1-9])")
    assert len(pinned) > len(PINS) / 2
    assert not {name for name in pinned if newer.search(installed[name].get("Requires-Python") or "")}


OUTPUT = """\
Looking in links: /opt/wheels
Obtaining file:///home/me/headrace
Collecting msgspec>=0.20
  Downloading msgspec-0.22.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (5.5 kB)
Collecting torch==2.13.0
Requirement already satisfied: pip in ./.venv
Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (188.9 MB)
Using cached msgspec-0.22.0-cp311-cp311-manylinux_2_28_x86_64.whl (219 kB)
  Downloading pycosat-0.6.6.tar.gz (71 kB)
Building wheel for pycosat (setup.py): started
Building wheel for pycosat (setup.py): finished with status 'done'
Installing collected packages: msgspec, torch
"""


def test_progress_is_a_line_for_each_package(capsys: pytest.CaptureFixture[str]) -> None:
    progress = install.Progress()
    progress.beat()
    for line in OUTPUT.splitlines():
        progress.read(line)
    progress.beat()
    progress.beat()
    assert capsys.readouterr().out.splitlines() == [
        "  … asking the package index (5 s)",
        "  torch 2.13.0+cpu  188.9 MB",
        "  msgspec 0.22.0  219 kB",
        "  pycosat 0.6.6  71 kB",
        "  building pycosat",
        "  unpacking 2 packages",
        "  … unpacking 2 packages (15 s)",
    ]


def test_failure_of_pip_is_shown_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "install.log"
    assert install.pip("install", "--no-index", "a-package-that-is-not-there", log=log) != 0
    said = capfd.readouterr().err
    assert "No matching distribution found for a-package-that-is-not-there" in said
    assert str(log) in said
    assert "No matching distribution" in log.read_text()


def test_index_that_cannot_be_reached_costs_seconds_and_leaves_the_default_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(install, "CPU_INDEX", "http://127.0.0.1:9/whl/cpu")
    monkeypatch.setattr(install, "installed_version", lambda name: "")
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert install.install_torch("auto", tmp_path / "log") == 0
    said = capsys.readouterr().out
    assert "looking for torch's CPU build at http://127.0.0.1:9/whl/cpu" in said
    assert "torch's default build is taken" in said
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("build", ["auto", "default"])
def test_build_of_torch_that_is_there_stays(build: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "installed_version", lambda name: f"{PINS['torch']}+cu130")
    monkeypatch.setattr(install, "has_build", lambda *_: pytest.fail("it asked"))
    assert install.install_torch(build, tmp_path / "log") == 0


def test_machine_without_a_compiler_gets_everything_but_what_needs_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "installed_version", lambda name: "")
    monkeypatch.setattr(install, "can_compile", lambda: False)
    assert install.choose_extras(["dev"]) == ["dev"]
    assert "reasoning-gym cannot be built" in capsys.readouterr().out
    monkeypatch.setattr(install, "can_compile", lambda: True)
    assert install.choose_extras(["dev"]) == ["dev", "reasoning-gym"]
    assert install.choose_extras([]) == []


def uv() -> str:
    """The resolver; it reads metadata alone, where pip would fetch gigabytes."""
    found = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if not found:
        pytest.skip("uv is not installed: pip install uv")
    return found


def compiled(extra: str, python: str, platform: str, *options: str) -> dict[str, str]:
    """What the package index alone gives, without wheels, indexes and settings of this machine."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_", "VIRTUAL_ENV"))}
    if cache := os.environ.get("UV_CACHE_DIR"):
        own["UV_CACHE_DIR"] = cache
    version = f"{python}.0"
    command = [uv(), "pip", "compile", "--no-config", "--quiet", "--system-certs", "--no-header", "--no-annotate",
               "--python-version", version, "--python-platform", platform, "--extra", extra, *options,
               "pyproject.toml"]  # fmt: skip
    # torch 2.13 has wheels for macOS 14, uv assumes 13
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False,
        env={**own, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
    )  # fmt: skip
    if re.search(r"dns error|client error \(Connect\)|error sending request|tcp connect", done.stderr):
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_and_platform_resolves(python: str, platform: str) -> None:
    only_wheels = ["--only-binary", ":all:", *(word for name in FROM_SOURCE for word in ("--no-binary", name))]
    found = compiled("dev", python, platform, "--extra", "reasoning-gym", "-c", "constraints.txt", *only_wheels)
    print(f"{python}, {platform}: {len(found)} packages, torch {found['torch']}, triton {found.get('triton', 'none')}")
    assert found["torch"] == PINS["torch"]
    assert ("triton" in found) == ("linux" in platform)
    loose = {name for name in found if name not in PINS and not BROUGHT_BY_TORCH.fullmatch(name)}
    assert not loose, "the constraints leave these open"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_developers_tools_need_no_compiler_without_reasoning_gym() -> None:
    sources = [word for name in FROM_SOURCE - {"pycosat"} for word in ("--no-binary", name)]
    assert compiled("dev", "3.12", PLATFORMS[0], "-c", "constraints.txt", "--only-binary", ":all:", *sources)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_extras_resolve_beside_the_constraints() -> None:
    extras = sorted(PROJECT["optional-dependencies"].keys() - OUTSIDE - {"dev"})
    more = [word for extra in extras for word in ("--extra", extra)]
    assert "torch" in compiled("dev", "3.11", PLATFORMS[0], "-c", "constraints.txt", *more)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", PYTHONS)
def test_package_resolves_without_the_constraints(python: str) -> None:
    """As ``pip install headrace`` does, on the oldest Linux that torch has wheels for too."""
    assert "torch" in compiled("lora", python, OLD_GLIBC, "--only-binary", ":all:")
