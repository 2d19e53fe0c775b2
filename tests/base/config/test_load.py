from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.config import load_toml, merge, parse_override
from headrace.base.errors import ConfigError

KEYS = st.sampled_from("abc")
TREES = st.recursive(st.integers(0, 9), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)
TABLES = st.dictionaries(KEYS, TREES, max_size=3)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("learner.lr=1e-6", {"learner": {"lr": 1e-6}}),
        ("run.steps=300", {"run": {"steps": 300}}),
        ("data.shuffle=false", {"data": {"shuffle": False}}),
        ("learner.betas=[0.9, 0.95]", {"learner": {"betas": [0.9, 0.95]}}),
        ('run.dir="12"', {"run": {"dir": "12"}}),
        ("data.path=rows/my file.jsonl", {"data": {"path": "rows/my file.jsonl"}}),
        ("env.reward=a.py:f", {"env": {"reward": "a.py:f"}}),
        ("data.path=", {"data": {"path": ""}}),
        ("run.dir=a=b", {"run": {"dir": "a=b"}}),
        ("algo.loss={kind = 'grpo'}", {"algo": {"loss": {"kind": "grpo"}}}),
        ("run.dir=1\nsteps=2", {"run": {"dir": "1\nsteps=2"}}),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(text: str, tree: dict[str, object]) -> None:
    assert parse_override(text) == tree


@pytest.mark.parametrize("text", ["learner.lr", "=3", " =3", ""])
def test_an_override_without_a_key_and_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"remedy: write --set section\.key=value"):
        parse_override(text)


@given(TABLES, TABLES)
def test_merging_lays_one_tree_over_the_other_and_changes_neither(base: dict, over: dict) -> None:
    before = repr((base, over))
    merged = merge(base, over)
    assert repr((base, over)) == before
    assert merge(merged, over) == merged
    assert set(merged) == set(base) | set(over)
    for key, value in over.items():
        if not (isinstance(value, dict) and isinstance(base.get(key), dict)):
            assert merged[key] == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[learner]\nlr = 1e-6\nlr = 2\n", "line 3"),
        ("[learner]\nlr = \n", "line 2"),
        ("[learner\n", "line 1"),
    ],
)
def test_a_run_file_that_is_not_toml_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        load_toml(path)
    assert str(path) in str(refused.value)


def test_a_run_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(ConfigError) as refused:
            load_toml(path)
        assert str(path) in refused.value.problem
