"""Which GPUs the parts of a run are shown on two nodes of eight GPUs that Ray only believes in, as a program:

python -m tests.wings.cluster.ray_gpus     prints one JSON object
"""

from __future__ import annotations

import asyncio
import json

from headrace.engine import EngineConfig
from headrace.launch.config import RayConfig, ResourceShare
from headrace.wings.cluster.far.supervisor import ProcessSupervisor
from headrace.wings.cluster.ray import cluster as on_ray
from headrace.wings.cluster.ray.fit import _name_device
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.wire import Address
from headrace.wings.servers.vllm.command import command


class Probe(ProcessSupervisor):
    """A supervisor that also says what a vLLM of its part would be shown."""

    def __init__(self) -> None:
        ProcessSupervisor.__init__(self, on_ray.own_address())

    def shown(self, width: int) -> tuple[str, str]:
        """Return the node and the GPUs of a server that computes on ``width`` of them."""
        import ray

        config = EngineConfig.model_validate({"kind": "vllm", "device": _name_device(width), "tensor": width})
        required = ServeRequirements(path="/models/m", dtype="bfloat16", max_context=4096)
        started = command(config, required, Address(url="http://vllm", socket="/x/s"))
        return ray.get_runtime_context().get_node_id(), started.variables["CUDA_VISIBLE_DEVICES"]


async def placed(address: str, engines: int, width: int, ranks: int) -> dict[str, tuple[str, str]]:
    """Return the node and the GPUs of each part of a run."""
    share = {"engine": ResourceShare(cpus=0.1, gpus=width), "learner": ResourceShare(cpus=0.1, gpus=1)}
    parts = [
        *((f"learner-{rank}", share["learner"]) for rank in range(ranks)),
        *((f"engine-{number}", share["engine"]) for number in range(engines)),
    ]
    cluster = await on_ray.RayCluster.connect(address)
    reservation = await cluster.reserve(parts, RayConfig().placement, 120.0)
    actors = {name: (cluster.start_supervisor(name, wanted, reservation), wanted.gpus) for name, wanted in parts}
    found = {name: tuple(await actor.call("shown", gpus)) for name, (actor, gpus) in actors.items()}
    for actor, _ in actors.values():
        actor.kill()
    await cluster.leave()
    return found


def main() -> None:
    """Start the cluster, and place two runs on it one after the other."""
    from ray.cluster_utils import Cluster

    on_ray._NodeSupervisor = Probe
    small = {"num_cpus": 4, "num_gpus": 8, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    cluster.add_node(**small)
    cluster.wait_for_nodes()
    runs = ((8, 1, 4), (2, 4, 4))
    print(json.dumps([asyncio.run(placed(cluster.address, *run)) for run in runs]), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
