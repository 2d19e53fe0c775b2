"""What is under ``deploy/``: scripts that are run here with stand-ins for the programs of a cluster, a manifest that
mounts what it names, an image that names what is there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.base.clock import RealClock

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
STAND_IN = """#!/usr/bin/env bash
call="$(basename "$0")$(printf ' %q' "$@")"
echo "$call [${RAY_AUTH_MODE:-} ${#RAY_AUTH_TOKEN} ${RAY_ADDRESS:-}]" >> "$CALLS"
"""
"""Each call in one piece: several write at once."""
INTERRUPTED = """
trap 'echo interrupted >> "$CALLS"; exit 130' TERM
"""
WAITS = (
    STAND_IN.replace("\n", INTERRUPTED, 1)
    + """
while [ ! -e "$CALLS.end" ]; do sleep 0.05; done
exit 3
"""
)
"""It can be interrupted before it says that it is there."""


def stand_ins(directory: Path, **programs: str) -> dict[str, str]:
    """Programs that write down how they are called, first on the path."""
    (directory / "bin").mkdir(parents=True)
    for name, text in programs.items():
        file = directory / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
    path = f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CALLS": str(directory / "calls")}


def slurm(directory: Path, nodes: int, **more: str) -> dict[str, str]:
    """What Slurm says to the script of a job."""
    programs = {"srun": STAND_IN, "ray": STAND_IN, "headrace": STAND_IN, "scontrol": STAND_IN, **more}
    job = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_CPUS_PER_TASK": "16"}
    place = {"SLURMD_NODENAME": "n1", "SLURM_SUBMIT_DIR": str(ROOT)}
    return {**stand_ins(directory, **programs), **job, **place}


def calls(environment: dict[str, str], program: str, at_least: int = 0) -> list[str]:
    """How it was called; those in the background may take a moment."""
    clock = RealClock()
    until_s = clock.now() + 20.0
    while True:
        lines = Path(environment["CALLS"]).read_text().splitlines()
        found = [line for line in lines if line.split()[0] == program]
        if len(found) >= at_least or clock.now() > until_s:
            return found


@pytest.mark.parametrize("script", ["slurm.sh", "train.sh"])
def test_scripts_are_sound_shell(script: str) -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / script)], check=True)
    assert os.access(DEPLOY / script, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(DEPLOY / script)], check=True)


@pytest.mark.parametrize("begun", ["", "ledger.sqlite", "ledger.redis"])
def test_a_run_is_begun_once_and_resumed_from_then_on(tmp_path: Path, begun: str) -> None:
    environment = stand_ins(tmp_path, headrace=STAND_IN)
    run = tmp_path / "a run"
    run.mkdir()
    if begun:
        (run / begun).touch()
    subprocess.run([DEPLOY / "train.sh", "run.toml", run, "--set", "run.steps=3"], env=environment, check=True)
    (call,) = calls(environment, "headrace")
    words = shlex.split(call.partition(" [")[0])
    assert words[1:] == [
        "train",
        "run.toml",
        "--set",
        f"run.dir={run}",
        "--set",
        "run.steps=3",
        *["--resume"] * bool(begun),
    ]
    assert subprocess.run([DEPLOY / "train.sh"], env=environment, check=False, capture_output=True).returncode == 2


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_of_slurm_starts_ray_on_every_node_with_a_token_and_runs_the_run_on_the_first(
    tmp_path: Path, nodes: int
) -> None:
    environment = slurm(tmp_path, nodes)
    subprocess.run([DEPLOY / "slurm.sh", "run.toml", tmp_path], env=environment, check=True, timeout=60)
    head, *others = sorted(calls(environment, "srun", at_least=min(nodes, 2)), key=lambda call: "--head" not in call)
    address = re.search(r"--node-ip-address=(\S+)", head)
    assert address is not None
    assert "--nodelist=n1" in head
    assert "--port=22345" in head
    assert len(others) == (nodes > 1)
    if nodes > 1:
        assert "--nodes=2 --ntasks=2 --exclude=n1 ray start --address=" in others[0]
    (run,) = calls(environment, "headrace")
    assert "--set launch.kind=ray --set launch.ray.engine.gpus=1 --set launch.ray.learner.gpus=1" in run
    for call in (head, *others, run):
        assert call.endswith(f"[token 64 {address[1]}:22345]")
    assert calls(environment, "scontrol") == []


@pytest.mark.parametrize(
    ("told", "requeue", "again"), [(signal.SIGUSR1, "1", 1), (signal.SIGUSR1, "0", 0), (signal.SIGTERM, "1", 0)]
)
def test_a_job_whose_time_is_up_ends_its_run_and_is_queued_again_and_one_that_is_cancelled_is_not(
    tmp_path: Path, told: signal.Signals, requeue: str, again: int
) -> None:
    environment = {**slurm(tmp_path, 1, headrace=WAITS), "HEADRACE_REQUEUE": requeue}
    said = Path(environment["CALLS"])
    with subprocess.Popen([DEPLOY / "slurm.sh", "run.toml", tmp_path], env=environment) as job:
        while not said.exists() or not calls(environment, "headrace"):
            assert job.poll() is None
        job.send_signal(told)
        assert job.wait(60) == 130
    assert "interrupted" in said.read_text()
    assert len(calls(environment, "scontrol")) == again


def test_a_run_that_fails_is_the_failure_of_its_job(tmp_path: Path) -> None:
    environment = slurm(tmp_path, 1, headrace=WAITS)
    Path(environment["CALLS"] + ".end").touch()
    done = subprocess.run([DEPLOY / "slurm.sh", "run.toml", tmp_path], env=environment, check=False, timeout=60)
    assert done.returncode == 3
    assert calls(environment, "scontrol") == []


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def test_the_manifest_asks_for_a_token_and_mounts_what_it_names() -> None:
    job, _ = manifests()
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert job["spec"]["entrypoint"].startswith("headrace-train /etc/headrace/run.toml /shared/")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: word and arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = filter(None, map(str.strip, text.replace("\\\n", " ").splitlines()))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_the_image_takes_torch_from_no_index_but_that_which_its_builder_names() -> None:
    """An index of one CUDA version holds the pinned torch only by chance; where it does not, pip says nothing and takes
    another build."""
    steps = instructions()
    assert ("ARG", 'TORCH=""') in steps
    (install,) = [arguments for word, arguments in steps if word == "RUN" and "pip install" in arguments]
    for torch, indexes in ("", []), ("https://index", ["--extra-index-url", "https://index"]):
        told = install.replace("pip install", "printf '%s\\n'", 1)
        said = subprocess.run(
            ["sh", "-c", told], env={"TORCH": torch, "EXTRAS": "ray"}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert said == ["--no-cache-dir", *indexes, "-c", "constraints.txt", ".[ray]"]


def test_the_image_is_made_of_files_and_extras_that_are_there_and_runs_as_nobody_special() -> None:
    steps = instructions()
    known = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "USER", "ENV", "CMD"}
    assert {word for word, _ in steps} <= known
    assert [word for word, _ in steps].index("USER") > max(
        place for place, (word, _) in enumerate(steps) if word == "RUN"
    )
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    for word, arguments in steps:
        if word == "COPY":
            sources = [part for part in arguments.split()[:-1] if not part.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
                assert f"!{source.removeprefix('./')}" in kept, source
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = [arguments.partition("=")[2] for word, arguments in steps if arguments.startswith("EXTRAS=")]
    assert set(extras.split(",")) <= declared["optional-dependencies"].keys()
    (python,) = [arguments.partition("=")[2] for word, arguments in steps if arguments.startswith("PYTHON=")]
    assert f">={python}" == declared["requires-python"]


def test_names_of_the_image_and_of_ray_are_the_same_everywhere() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    image = f"headrace:{declared['version']}"
    assert (DEPLOY / "Dockerfile").read_text().count(f"-t {image}") == 2
    cluster = manifests()[0]["spec"]["rayClusterSpec"]
    images = {
        container["image"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        for container in group["template"]["spec"]["containers"]
    }
    assert images == {image}
