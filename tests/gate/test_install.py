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
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
OUTSIDE = {"verifiers", "openenv", "trackio"}
"""Extras that want older versions of what the constraints pin; each is tested in an environment of its own."""
FROM_SOURCE = {"cellpylib", "chess", "pycosat", "zss"}
"""Packages without a wheel; of these pycosat alone needs a compiler, and comes with reasoning-gym."""


def test_constraints_leave_to_torch_what_its_builds_require_exactly() -> None:
    assert [name for name in PINS if BROUGHT_BY_TORCH.fullmatch(name)] == []


@pytest.mark.parametrize("name", sorted(PINS))
def test_pinned_version_allows_the_oldest_python(name: str) -> None:
    """Of what is installed here; :func:`test_each_python_and_platform_resolves` asks the index about everything."""
    try:
        found = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed here")
    if found["Version"].partition("+")[0] != PINS[name]:
        pytest.skip(f"{name} {found['Version']} is installed here")
    wanted = found.get("Requires-Python") or ">=3"
    assert not re.search(r">=\s*3\.(1[2-9]|11\.[1-9])", wanted), f"{name}=={PINS[name]} requires Python {wanted}"


def uv() -> str:
    """The resolver; it reads metadata alone, where pip would fetch gigabytes."""
    found = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if not found:
        pytest.skip("uv is not installed: pip install uv")
    return found


def compiled(extra: str, python: str, platform: str, *options: str) -> dict[str, str]:
    """What the package index alone gives, without wheels, indexes and settings of this machine."""
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("UV_", "PIP_", "VIRTUAL_ENV")) or key == "UV_CACHE_DIR"
    }
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
    """As ``pip install headrace`` does."""
    assert "torch" in compiled("lora", python, PLATFORMS[0])
