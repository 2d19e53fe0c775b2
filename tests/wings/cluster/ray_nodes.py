"""A Ray cluster of several nodes inside this machine: started as a program, told by lines what to do.

python -m tests.wings.cluster.ray_nodes NUM_NODES CPUS     prints its address, then obeys: lose N · add · end
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.venvs import HEADRACE, ROOT, python_with_ray

DEADLINE_S = 240.0


def serve(num_nodes: int, cpus: int) -> None:
    """The head has no room for parts, and cannot be lost."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
    nodes: list[Any] = []

    def add() -> None:
        nodes.append(cluster.add_node(num_cpus=cpus, object_store_memory=80 << 20))

    for _ in range(num_nodes):
        add()
    cluster.wait_for_nodes()
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "end":
            break
        if word == "add":
            add()
        else:
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        print(json.dumps({"did": line.strip()}), flush=True)
    cluster.shutdown()


@dataclass(slots=True)
class Nodes:
    """The cluster, as a test sees it."""

    process: subprocess.Popen[str]
    python: Path
    address: str

    def tell(self, order: str) -> None:
        """Have nodes lost or added; returns when that is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        assert json.loads(self.process.stdout.readline()) == {"did": order}

    def command(self, *arguments: str | Path) -> list[str]:
        """``headrace``, in the Python that has Ray."""
        return [str(self.python), "-c", HEADRACE, *map(str, arguments)]

    def headrace(self, *arguments: str | Path, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """The program, to its end."""
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=timeout_s, check=False, env=environment()
        )


def environment() -> dict[str, str]:
    """Of everything that speaks with the cluster."""
    patient = {"RAY_raylet_start_wait_time_s": "180"}
    quiet = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", **quiet, **patient}


@contextmanager
def ray_nodes(num_nodes: int = 3, cpus: int = 1) -> Iterator[Nodes]:
    """Nodes of one machine; all of them are gone afterwards."""
    python = python_with_ray()
    command = [str(python), "-m", "tests.wings.cluster.ray_nodes", str(num_nodes), str(cpus)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield Nodes(process, python, json.loads(process.stdout.readline())["address"])
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.communicate("end\n", timeout=60)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
