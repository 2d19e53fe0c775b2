"""``headrace check model``: what it proves of the families that people bring, and how it refuses all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headrace.models.attention import PackedPlan
from headrace.policy import model_check
from headrace.policy.model_check import ModelReport, check_model
from headrace.run.cli.app import app
from tests.models.families import FAMILIES, FAST, family
from tests.models.kinds import add_tokens, tiny

PARTS = ["load", "gap learner", "pack", "gap engine", "decode", "train", "publish", "export"]
CLOSE = {"pack": 1e-5}
"""Nats; 2e-5 for all other parts."""


def refute(report: ModelReport) -> None:
    """Raise ``AssertionError`` unless every part of the check holds, more closely than the check itself asks for."""
    assert report.ok, str(report)
    assert [each.part for each in report.findings] == PARTS
    for each in report.findings:
        assert each.gap is None or each.gap < CLOSE.get(each.part, 2e-5), f"{each.part}: {each.detail}"


@pytest.mark.parametrize("name", FAST)
def test_family_is_computed_trained_published_and_exported_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    refute(check_model(str(family(tmp_path / "model", name)), longest=300))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_so_at_every_length(name: str, tmp_path: Path) -> None:
    refute(check_model(str(family(tmp_path / "model", name, max_position_embeddings=2048))))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_an_adapter(name: str, tmp_path: Path) -> None:
    refute(check_model(str(family(tmp_path / "model", name)), longest=64, lora=True))


def test_tokenizer_that_has_more_tokens_than_the_model_does_not_matter_to_its_weights(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", "llama")
    add_tokens(path)
    refute(check_model(str(path), longest=32))


def test_model_that_transformers_itself_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    report = check_model(str(tiny(tmp_path / "model", "deepseek_v3", num_key_value_heads=2)))
    assert report.verdict == "refused"
    assert "is a DeepseekV3ForCausalLM: transformers' own attention fails" in report.reason


def test_failure_of_a_foreign_model_says_after_which_part_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such tensor")

    directory = str(tiny(tmp_path / "model", "llama"))
    monkeypatch.setattr(model_check._Check, "_check_learner", broken)
    report = check_model(directory, longest=32)
    assert (report.verdict, report.reason) == ("fails", "after load: RuntimeError: no such tensor")


def test_model_that_is_computed_differently_fails_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(tiny(tmp_path / "model", "llama"))
    attend = PackedPlan.attend

    def forgetful(self: PackedPlan, query: Any, key: Any, value: Any, rule: Any) -> torch.Tensor:
        found = attend(self, query, key, value, rule)
        return found * (self.positions_N < 20)[:, None, None]

    monkeypatch.setattr(PackedPlan, "attend", forgetful)
    report = check_model(directory, longest=64, whole=False)
    assert report.verdict == "fails"
    assert "gap learner: largest |Δ logprob|" in report.reason
    assert "of 63" in report.reason


def test_command_writes_the_report_for_programs_and_ends_with_an_error_for_a_refused_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", "model", str(tiny(tmp_path / "a", "llama")), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["verdict"] == "works"
    assert [each["part"] for each in report["findings"]] == PARTS
    refused = CliRunner().invoke(app, ["check", "model", str(tiny(tmp_path / "b", "gptj")), "--json"])
    assert refused.exit_code == 1
    report = json.loads(refused.stdout)
    assert report["verdict"] == "refused"
    assert report["remedy"].startswith("use a decoder-only text model")
    said = CliRunner().invoke(app, ["check", "model", str(tmp_path / "b")])
    assert "  remedy: use a decoder-only text model" in said.stdout
