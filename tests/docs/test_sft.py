"""The page on training on given rows, walked as it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, read_blocks
from tests.docs.test_newcomer import done

PAGE = ROOT / "docs" / "sft.md"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_leads_from_rows_to_an_exported_model(tmp_path: Path) -> None:
    for block in read_blocks(PAGE):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            done(block.text, tmp_path)
    summaries = [json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("sft", "dpo")]
    assert [each["status"] for each in summaries] == ["finished", "finished"]
    assert [each["steps"] for each in summaries] == [50, 5]
    assert summaries[0]["eval_last"]["loss"] < summaries[0]["eval_first"]["loss"]
    assert summaries[0]["ledger"]["groups"]["trained"] == 800
    for name in ("sft", "dpo"):
        assert (tmp_path / "out" / name / "model.safetensors").is_file()


def test_a_run_file_of_sft_has_under_twenty_lines() -> None:
    (run_file,) = [block for block in read_blocks(PAGE) if block.title == "sft.toml"]
    assert len(run_file.text.splitlines()) < 20
