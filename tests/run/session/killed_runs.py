"""What the runs whose parts are killed have in common: settings under which a run lasts long enough, and its books."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SLOW_REWARD = """
    import time

    def reward(completion):
        time.sleep(0.03)
        return sum(character in "01234" for character in completion) / 4
"""
LONG = {"max_new_tokens": 20, "max_sequences": 16, "flush_tokens": 4}
FLOW = {"groups_per_step": 2, "group_size": 4}


def ended(run_dir: Path, steps: int, *, resumed: bool = False) -> dict[str, Any]:
    """The summary of a run that has come to its end and has lost nothing."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["versions"][1]) == ("finished", steps, steps)
    assert resumed or summary["versions"][0] == 0
    groups, episodes, tokens = (summary["ledger"][unit] for unit in ("groups", "episodes", "tokens"))
    assert groups == {"submitted": 2 * steps, "trained": 2 * steps, "dropped": {}, "in_flight": 0}
    assert episodes == {"submitted": 8 * steps, "trained": 8 * steps, "dropped": {}, "in_flight": 0}
    assert (tokens["submitted"], tokens["in_flight"]) == (tokens["trained"], 0)
    return summary
