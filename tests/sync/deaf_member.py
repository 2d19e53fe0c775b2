"""A member of the benchmark of process groups that no group reaches: an engine names an address that nobody has."""

from __future__ import annotations

from typing import Any

from headrace.sync import group, groups
from headrace.wings.bench import sync_group_worker
from headrace.wings.bench.engine_peers import answer_requests

NOWHERE = "192.0.2.1"
"""An address of the range for documentation (RFC 5737), which no machine has."""


def deaf(store: Any, rank_and_size: tuple[int, int], deadline_s: float, host: str) -> groups.ProcessGroup:
    return groups.gloo_group(store, rank_and_size, deadline_s, NOWHERE if rank_and_size[0] else host)


if __name__ == "__main__":
    group.gloo_group = deaf
    answer_requests(sync_group_worker.open_side)
