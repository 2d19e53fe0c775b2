"""Runs under a grammar: every answer fits, and the learner's logprobs are those that tokens were drawn with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.models.tiny import TinySpec, make_tiny
from headrace.run.session import load_config, train
from tests.run.session.runs import make_run, tiny_model
from tests.wings.serve.test_server_structure import byte_tokenizer

pytest.importorskip("llguidance")
REWARD = """
    def reward(completion):
        with open("answers.txt", "a") as file:
            file.write(completion + "\\n")
        return float("7" in completion)
"""


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes."""
    size = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64, "max_positions": 64}
    spec = TinySpec(vocab="".join(chr(0x100 + at) for at in range(260)), init_std=0.3, **size)
    directory: Path = make_tiny(tmp_path_factory.mktemp("bytes") / "bytes", spec)
    byte_tokenizer().save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        tree = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**tree, "eos_token_id": 0, "pad_token_id": 0}))
    return directory


def trained(
    directory: Path, model: Path, monkeypatch: pytest.MonkeyPatch, *settings: str
) -> tuple[list[str], list[dict[str, Any]]]:
    """The answers of a run, and the metrics of its steps."""
    run_file = make_run(directory, model, reward=REWARD, engine={"max_new_tokens": 12, "max_sequences": 16})
    monkeypatch.chdir(directory)
    train(load_config(run_file, [*settings]))
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3, rows
    return (directory / "answers.txt").read_text().splitlines(), rows


SOME = 'engine.structure.regex="[0-9]{2,6}(cm|m)"'


def test_learner_agrees_with_the_engine_under_a_grammar(
    tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, steps = trained(tmp_path, byte_model, monkeypatch, SOME, "flow.max_age=0")
    assert len(answers) >= 24
    assert all(re.fullmatch("[0-9]{2,6}(cm|m)", answer) for answer in answers)
    assert max(abs(step["metrics"]["mismatch_k3"]) for step in steps) < 1e-7


@pytest.mark.slow
def test_learner_without_the_kept_sets_sees_another_distribution(
    tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, steps = trained(tmp_path, byte_model, monkeypatch, SOME, "flow.max_age=0", "learner.keep_sampling_mask=false")
    assert min(abs(step["metrics"]["mismatch_k3"]) for step in steps) > 0.1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["engine.structure.regex=a", 'engine.structure.choice=["a"]'], "has regex and choice, and it takes one of"),
        (["engine.structure.regex="], "has nothing, and it takes one of"),
        (["engine.kind=vllm", "launch.start_timeout_s=400", "engine.structure.regex=a"], "has no engine.structure"),
        (
            ["engine.kind=sglang", "sync.interrupt=drain", "engine.structure.regex=a"],
            "has no engine.structure, with logprobs and kept-sets of the masked distribution",
        ),
    ],
)
def test_structures_that_no_run_can_have_are_refused_at_load(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config({"model": {"path": "m"}}, settings)


@pytest.mark.parametrize(
    ("setting", "words"),
    [("regex=(", "the structure cannot be kept to"), ('json_schema.type="nope"', "the structure cannot be kept to")],
)
def test_a_grammar_that_cannot_be_read_is_refused_before_anything_starts(
    tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch, setting: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"engine.structure: {words}"):
        trained(tmp_path, byte_model, monkeypatch, f"engine.structure.{setting}")


def test_a_grammar_over_letters_that_are_no_bytes_is_refused_by_name(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path_factory.mktemp("letters") / "model")
    with pytest.raises(ConfigError, match="needs a tokenizer of bytes"):
        trained(tmp_path, model, monkeypatch, "engine.structure.regex=[0-9]")
