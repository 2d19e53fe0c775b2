"""One rank of the tests: runs the named cases one after the other, and writes what each found.

python -m tests.learner.rank_main DIRECTORY CASE ...
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from headrace.base.environ import rank_place
from headrace.learner.parallel import context, mesh
from headrace.learner.parallel.config import ParallelConfig
from tests.learner import (  # fmt: skip
    rank_adapter_cases,
    rank_cases,
    rank_core_cases,
    rank_group_cases,
    rank_snapshot_cases,
)
from tests.wings.supervised import rank_cases as given

CASES = (rank_cases, rank_core_cases, rank_adapter_cases, rank_group_cases, rank_snapshot_cases, given)


def main(directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    context.MASKED_ROWS = 2  # so that short sequences need several blocks, too
    place = rank_place()
    found: dict[str, object] = {}
    config = ParallelConfig(data=place.world, timeout_s=60)
    rendezvous = "env://" if "MASTER_ADDR" in os.environ else f"file://{directory}/rendezvous"
    # The process groups of a mesh and their threads last as long as the process: the learners of all cases share them.
    mesh.init_device_mesh = torch.distributed.init_device_mesh = functools.cache(mesh.init_device_mesh)
    with mesh.join_ranks(config, place, torch.device("cpu"), rendezvous):
        for name in names:
            try:
                cases = next(each for each in CASES if hasattr(each, name))
                found[name] = getattr(cases, name)(directory)
            except Exception:  # noqa: BLE001 - the edge of the process: the test tells
                found[name] = {"failed": traceback.format_exc()}
                break
    (directory / f"found-{place.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
