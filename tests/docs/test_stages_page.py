"""The page on stages, walked as it is written: from a base model to an answer over HTTP."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from headrace.base.clock import RealClock
from tests.docs.pages import ROOT, read_blocks
from tests.docs.test_newcomer import PORT, walk

PAGE = ROOT / "docs" / "stages.md"
MINUTES = 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_leads_from_a_base_model_to_a_served_one_and_every_stage_solves_more(tmp_path: Path) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"something listens on port {PORT} already")
    clock = RealClock()
    began_s = clock.now()
    walk([block for block in read_blocks(PAGE) if block.title or block.language == "sh"], tmp_path, said := [])
    assert clock.now() - began_s < 60 * MINUTES
    tree = json.loads((tmp_path / "runs" / "all" / "stages.json").read_text())
    assert [each["name"] for each in tree["results"]] == ["base", "1-sft", "2-dpo", "3-rl"]
    for k in ("1", "2", "4"):
        shares = [each["pass_at"][k] for each in tree["results"]]
        assert shares == sorted(shares), f"pass@{k}: {shares}"
    assert tree["results"][-1]["pass_at"]["1"] > tree["results"][0]["pass_at"]["1"] + 0.3
    assert '"text":"560"' in said[-1].replace(" ", "")
