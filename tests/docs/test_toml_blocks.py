"""Every TOML block of the documents is a run file, or a fragment of one, that is accepted as it stands."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config import merge
from headrace.run.session import load_config
from headrace.wings.plan import load_cluster
from headrace.wings.supervised.config import DistillConfig, DpoConfig, SftConfig, TuningConfig, load_tuning
from headrace.wings.supervised.stages import load_stages
from tests.docs.pages import Block, blocks

BASE: dict[str, Any] = {"model": {"path": "models/any"}, "data": {"path": "rows.jsonl"}}
"""What a fragment is a fragment of."""
AROUND: dict[str, dict[str, Any]] = {
    "docs/environments.md": {"env": {"kind": "rollout", "entry": "my_env.py:rollout"}},
    "docs/launching.md": {"launch": {"kind": "ray"}, "sync": {"transport": "http"}},
}
"""What else the text around a fragment has said, by page; what the fragment says comes first."""
OWN_FILES = {"my_losses.py": "def soft_clip(inputs, sharpness=1.0): ..."}
"""Files that are looked at when a run file is loaded."""


def merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    return merge({}, *trees)


def whole(block: Block, tree: Mapping[str, Any]) -> dict[str, Any]:
    """A fragment as a run file: laid over what stands around it, and over rows and a model where it names none."""
    base = {name: section for name, section in BASE.items() if name == "model" or name not in tree}
    taught = {"algo": {"loss": {"kind": "distill"}}} if "teachers" in tree.get("learner", {}) else {}
    return merged(base, taught, AROUND.get(block.page, {}), tree)


RUN_FILES = [block for block in blocks("toml") if block.title != "pyproject.toml"]


@pytest.mark.parametrize("block", RUN_FILES, ids=str)
def test_settings_of_a_block_are_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in OWN_FILES.items():
        (tmp_path / name).write_text(text)
    tree = tomllib.loads(block.text)
    if "cluster" in tree:
        (tmp_path / "cluster.toml").write_text(block.text)
        assert load_cluster(tmp_path / "cluster.toml")
        return
    if "stage" in tree:
        loaded = load_stages(tree)
        assert all(stage.config(loaded.base) for stage in loaded.stages)
        return
    if block.page == "docs/sft.md":
        taught = "teacher" in tree or "teachers" in tree.get("learner", {})
        kind: type[TuningConfig] = DpoConfig if "loss" in tree else DistillConfig if taught else SftConfig
        assert load_tuning(kind, merged({"model": BASE["model"]}, tree))
        return
    assert load_config(whole(block, tree), [])


def test_a_setting_that_there_is_not_is_found() -> None:
    with pytest.raises(ValueError, match="did you mean 'max_age'"):
        load_config(merged(BASE, tomllib.loads("[flow]\nmax_agee = 1")), [])
