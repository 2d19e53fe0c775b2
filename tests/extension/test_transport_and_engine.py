"""A transport and an engine of a stranger, each one file and one entry point: in a run, and in the contract suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extension.conftest import Program, dry_runs
from tests.run.session.runs import make_run, tiny_model

KEEPS = """
import sys
from pathlib import Path

from headrace.sync.codecs import CODECS
from headrace.sync.config import Route
from headrace.testing.sync import CHECKS, open_pair

for codec in CODECS:
    for place, check in enumerate(CHECKS):
        folder = Path(sys.argv[1]) / f"{codec}-{place}"
        with open_pair(Route(transport="folder", codec=codec, address=str(folder), deadline_s=10.0), seed=7) as pair:
            check(pair)
print("kept")
"""
FITS = """
import sys
from headrace.run.session import load_config

config = load_config(sys.argv[1])
print(config.sync.options, config.engine.server.volume, config.model_dump(mode="json")["engine"]["server"])
"""
CHANGES = {
    "sync": {"transport": "folder"},
    "sync.options": {"name": "weights"},
    "engine": {"kind": "quiet"},
    "engine.server": {"volume": 3},
    "run": {"steps": 2},
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_run(tmp_path / "home", tiny_model(tmp_path / "model"), **CHANGES)


def test_a_run_sends_weights_by_the_transport_and_samples_with_the_engine_of_a_stranger(
    stranger: Program, home: Path
) -> None:
    done = stranger("train", home, "--json", cwd=home.parent)
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["steps"] == 2
    assert (home.parent / "run/folder").is_dir()


def test_settings_of_both_are_of_their_own_sections(stranger: Program, home: Path) -> None:
    assert "{'name': 'weights'} 3 {'volume': 3}" in stranger(home, code=FITS, cwd=home.parent).stdout
    said = stranger("train", home, "--dry-run", cwd=home.parent)
    assert "A quiet engine samples at volume 3." in said.stdout, said.stderr


REFUSED = {
    "sync.transport=foldr": ["sync.transport='foldr' does not exist", "did you mean 'folder'"],
    "sync.options.nam=x": ["sync.options.nam is not a setting"],
    "engine.kind=quite": ["did you mean 'quiet'"],
    "engine.server.volume=loud": ["engine.server.volume='loud'"],
    "engine.max_pinned_versions=3": ["engine.max_pinned_versions=3 is of engine.kind='native'"],
    "observe.record_entropy=true": ["engine.kind='quiet' has no entropies"],
    "launch.kind=rya": ["did you mean 'ray'"],
}
"""For each setting what the program says of it."""


def test_settings_of_both_are_refused_as_our_own(stranger: Program, home: Path) -> None:
    found = dry_runs(stranger, home, REFUSED)
    for setting, words in REFUSED.items():
        status, stderr = found[setting]
        assert status == 1, setting
        for each in words:
            assert each in " ".join(stderr.split()), setting


def test_the_transport_keeps_the_contract_with_every_codec(stranger: Program, tmp_path: Path) -> None:
    done = stranger(tmp_path, code=KEEPS, cwd=tmp_path)
    assert done.stdout == "kept\n", done.stderr
