"""A batch reaches a learner in another process, with experts of 48 layers, and no message grows with it."""

from __future__ import annotations

import sys

from headrace.wings.bench.controller import _run
from headrace.wings.bench.controller_batch import SPEC


def test_a_batch_with_experts_is_trained_over_real_sockets_in_small_messages() -> None:
    spec = {**SPEC, "groups": 8, "group_size": 8, "tokens": 1024, "engines": 4, "flush": 256}
    figures = _run(sys.executable, spec)
    num_tokens = spec["groups"] * spec["group_size"] * spec["tokens"]
    assert figures["trained_tokens"] == 2 * num_tokens
    assert figures["lost_tokens"] == 0
    assert figures["largest_message_mb"] * 2**20 < 12 * num_tokens / 2, "the tokens came with the outline"
