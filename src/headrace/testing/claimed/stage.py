"""The process of one stage of ``headrace bench gpu --pretend``: ``python -m headrace.testing.claimed.stage REQUEST``.
It is :mod:`headrace.wings.bench.gpu.stage` on a claimed device, whose own counters replace torch's profiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch

from headrace.testing.claimed.device import WORK
from headrace.wings.bench.gpu.stage import main


class ClaimedWork:
    """Counts what a GPU would have had to do."""

    def count(self, act: Callable[[], object]) -> Mapping[str, int]:
        """Do ``act``, and return how often each kind of work occurred."""
        WORK.reset()
        act()
        return {kind: WORK.counts[kind] for kind in ("launch", "wait", "upload", "download")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:], ClaimedWork())
