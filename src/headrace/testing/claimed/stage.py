"""The process of one stage of ``headrace bench gpu --pretend``: ``python -m headrace.testing.claimed.stage REQUEST``.
It runs :mod:`headrace.wings.bench.gpu.stage` on a claimed device (a simulated GPU), with the counters of the device
instead of torch's profiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch

from headrace.testing.claimed.device import WORK
from headrace.wings.bench.gpu.stage import main


class ClaimedWork:
    """The counter of GPU work, which replaces torch's profiler."""

    def count(self, act: Callable[[], object]) -> Mapping[str, int]:
        """Call ``act``, and return the number of launches, waits, uploads and downloads that a GPU would have had to
        do, by kind."""
        WORK.reset()
        act()
        return {kind: WORK.counts[kind] for kind in ("launch", "wait", "upload", "download")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:], ClaimedWork())
