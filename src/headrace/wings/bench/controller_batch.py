"""The case of the controller benchmark with a batch of ten million tokens. The controller sends the batch to a learner
in another process, with the experts of a large mixture. Neither a message nor the memory of the controller may grow
with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.wings.bench.base import Row, Target, at_least, at_most

CASE = "a batch of 10 million tokens with 8 experts in 48 layers"
SPEC: dict[str, Any] = {
    "groups": 80,
    "group_size": 16,
    "tokens": 8192,
    "turns": 1,
    "given": 0,
    "steps": 2,
    "episodes": 0,
    "layers": 48,
    "engines": 8,
    "slots": 16,
    "rate": 250_000,
    "flush": 512,
    "learner": True,
}
"""The settings of the run: two steps of 1,280 answers of 8,192 tokens. Each engine samples the answers of one group at
a time. All engines together sample 250,000 tokens per second, so that the ledger's disk can record the tokens as fast
as they are sampled."""
QUICK_GROUPS = 4
"""The number of groups of a step in a quick run."""
MOST_MB = 200.0
"""Maximum memory of the controller, in MiB."""
MOST_MESSAGE_MB = 64.0
"""Maximum size of a message to or from the learner, in MiB."""
TOKENS_S = 100_000.0
"""Least number of tokens per second, from the prompts to the end of the step."""


def measure(
    run: Callable[[dict[str, Any]], Row], on_progress: Callable[[str], None], *, quick: bool
) -> tuple[list[Row], list[Target]]:
    """Return the row of the case and its targets. ``run`` makes one run with given settings, and returns its figures.
    ``on_progress`` receives the name of the case. If ``quick`` is true, the batch is small."""
    on_progress(CASE)
    spec = {**SPEC, "groups": QUICK_GROUPS} if quick else SPEC
    row = {"case": CASE, "side": "now", "engines": spec["engines"], **run(spec)}
    return [row], [
        at_least(f"{CASE}: tokens_s", row["tokens_s"], TOKENS_S, "1/s"),
        at_most(f"{CASE}: peak memory", row["peak_mb"], MOST_MB, "MiB"),
        at_most(f"{CASE}: largest message", row["largest_message_mb"], MOST_MESSAGE_MB, "MiB"),
    ]
