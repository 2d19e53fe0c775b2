"""Models by their name on a hub, fetched by huggingface_hub itself from a hub of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models.fake_hub import FakeHub, Repository, fake_hub
from tests.run.session.runs import make_run, tiny_model

Run = Callable[..., subprocess.CompletedProcess[str]]
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories as hubs hold them: a sound model with things that nobody needs, and one of pickles alone."""
    top = tmp_path_factory.mktemp("hub")
    sound = tiny_model(top / "sound")
    (sound / "modeling_own.py").write_text("raise SystemExit('code of a hub has run')\n")
    (sound / "pytorch_model.bin").write_bytes(b"a pickle")
    (sound / "onnx").mkdir()
    (sound / "onnx" / "config.json").write_text("{}")
    later = top / "later"
    shutil.copytree(sound, later)
    shutil.copytree(tiny_model(top / "other", init_std=0.2), later, dirs_exist_ok=True)
    pickled = top / "pickled"
    shutil.copytree(sound, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    return {"sound": sound, "later": later, "pickled": pickled}


@pytest.fixture
def hub(models: dict[str, Path]) -> Iterator[FakeHub]:
    held = {
        "acme/tiny": Repository(revisions={"main": models["sound"], "v2": models["later"]}),
        "acme/pickled": Repository(revisions={"main": models["pickled"]}),
        "acme/gated": Repository(revisions={"main": models["sound"]}, gated=True),
        "acme/private": Repository(revisions={"main": models["sound"]}, private=True),
    }
    with fake_hub(held) as serving:
        yield serving


@pytest.fixture
def program(tmp_path: Path, hub: FakeHub) -> Run:
    """The program, whose hub is that of this machine and whose cache is empty at first."""

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "COLUMNS": "300"}
        command = [sys.executable, "-c", "from headrace.run.cli import main; main()", *map(str, arguments)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return subprocess.run(
            command, env={**kept, **given, **environment}, cwd=tmp_path, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip

    return run


ASK = """
import json, sys
from headrace.base.errors import ModelError
from headrace.models.hub import local_directory
try:
    said = {"found": local_directory(sys.argv[1], fetch=len(sys.argv) < 3)}
except ModelError as error:
    said = {"problem": error.problem, "remedy": error.remedy}
print(json.dumps(said))
"""


@pytest.fixture
def asked(tmp_path: Path, hub: FakeHub) -> Callable[..., dict[str, str]]:
    """What a program of that environment hears of a name."""

    def ask(name: str, *only_cached: str, **environment: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        given = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **environment}
        command = [sys.executable, "-c", ASK, name, *only_cached]
        done = subprocess.run(
            command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )  # fmt: skip
        found: dict[str, str] = json.loads(done.stdout)
        return found

    return ask


@pytest.fixture
def run_file(tmp_path: Path, models: dict[str, Path]) -> Path:
    made = make_run(tmp_path / "work", models["sound"])
    made.write_text(made.read_text().replace('path = "model"', 'path = "acme/tiny"'))
    assert 'path = "acme/tiny"' in made.read_text()
    return made


def test_a_dry_run_takes_the_small_files_alone(program: Run, run_file: Path, hub: FakeHub) -> None:
    planned = program("train", run_file, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert 'model.path = "acme/tiny@' in planned.stdout
    assert "config.json" in hub.fetched
    assert not {name for name in hub.fetched if name.endswith((".safetensors", ".bin", ".py"))}


def test_a_run_after_a_dry_run_takes_the_weights(program: Run, run_file: Path, hub: FakeHub) -> None:
    assert program("train", run_file, "--dry-run").returncode == 0
    done = program("train", run_file)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in hub.fetched
    assert not {name for name in hub.fetched if name.endswith((".bin", ".py"))}
    assert not [path for path in hub.asked if "onnx" in path]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_commit_though_the_branch_has_moved_on_and_the_network_is_gone(
    program: Run, run_file: Path, hub: FakeHub, models: dict[str, Path]
) -> None:
    commit = hub.repositories["acme/tiny"].commit("main")
    assert program("train", run_file, "--set", "run.steps=1").returncode == 0
    kept = json.loads((run_file.parent / "run" / "config.json").read_text())
    assert kept["model"]["path"] == f"acme/tiny@{commit}"
    hub.repositories["acme/tiny"].revisions["main"] = models["later"]
    resumed = program("train", run_file, "--resume", "--set", "run.steps=2")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert json.loads((run_file.parent / "run" / "config.json").read_text())["model"]["path"] == f"acme/tiny@{commit}"
    hub.asked.clear()
    offline = program("train", run_file, "--resume", "--set", "run.steps=3", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stdout + offline.stderr
    assert hub.asked == []
    moved = program("train", run_file, "--dry-run")
    assert f"acme/tiny@{hub.repositories['acme/tiny'].commit('main')}" in moved.stdout


def test_a_revision_is_a_branch_a_tag_or_a_commit(asked: Callable[..., dict[str, str]], hub: FakeHub) -> None:
    commit = hub.repositories["acme/tiny"].commit("v2")
    for name in ("acme/tiny@v2", f"acme/tiny@{commit}"):
        assert asked(name)["found"].endswith(f"/snapshots/{commit}")


def test_a_model_that_is_not_in_the_cache_keeps_its_name_where_nothing_is_fetched(asked, hub: FakeHub) -> None:
    assert asked("acme/tiny", "only cached") == {"found": "acme/tiny"}
    assert asked("acme/tiny@main", "only cached") == {"found": "acme/tiny@main"}


@pytest.mark.parametrize(
    ("name", "environment", "words"),
    [
        ("acme/pickled", {}, ("its weights are pickles (pytorch_model.bin), which run code", "NAME@refs/pr/1")),
        ("acme/gated", {}, ("the model is gated, and its owner has not let you in", "/acme/gated, then log in")),
        ("acme/private", {}, ("no model of that name at http://127", "for a private model, log in (hf auth login")),
        ("acme/tinny", {}, ("there is no directory acme/tinny here, and no", "mean the directory acme/tiny-copy?")),
        ("acme/tiny@v3", {}, ("acme/tiny has no revision 'v3' at http://127", "a branch, a tag or a commit")),
        ("acme/tiny", {"HF_HUB_OFFLINE": "1"}, ("HF_HUB_OFFLINE is set, and its cache", "unset HF_HUB_OFFLINE")),
        ("acme/tiny", {"HF_ENDPOINT": NOWHERE}, ("it could not be fetched from http://127.0.0.1:9", "the network")),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said_with_its_remedy(
    name: str,
    environment: dict[str, str],
    words: tuple[str, str],
    asked: Callable[..., dict[str, str]],
    tmp_path: Path,
) -> None:
    problem, remedy = words
    (tmp_path / "acme" / "tiny-copy").mkdir(parents=True)
    (tmp_path / "acme" / "tiny-copy" / "config.json").touch()
    said = asked(name, **environment)
    assert said["problem"].startswith(f"model.path='{name}'")
    assert problem in said["problem"]
    assert remedy in said["remedy"]


def test_a_token_opens_a_private_model(asked: Callable[..., dict[str, str]]) -> None:
    assert "models--acme--private/snapshots/" in asked("acme/private", HF_TOKEN="hf_secret")["found"]


@pytest.mark.slow
def test_every_setting_that_names_a_model_takes_a_name_of_a_hub(program: Run, run_file: Path, hub: FakeHub) -> None:
    given = ("--set", "learner.reference.kind=frozen", "--set", "learner.reference.path=acme/tiny@v2")
    done = program("train", run_file, *given, "--set", "algo.loss.kind=grpo", "--set", "algo.loss.kl_coef=0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((run_file.parent / "run" / "config.json").read_text())
    assert kept["learner"]["reference"]["path"] == f"acme/tiny@{hub.repositories['acme/tiny'].commit('v2')}"
    refused = program("train", run_file, "--dry-run", *given[:3], "learner.reference.path=acme/none")
    assert "learner.reference.path='acme/none'" in refused.stderr


@pytest.mark.slow
def test_policies_and_servers_take_a_name_of_a_hub(program: Run, hub: FakeHub, tmp_path: Path) -> None:
    script = "import headrace; policy = headrace.Policy.load('acme/tiny'); print(policy.config.model.path)"
    given = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)
    assert "models--acme--tiny/snapshots/" in done.stdout, done.stderr
    refused = program("serve", "acme/none", "--port", "0")
    assert "no model of that name" in refused.stderr
