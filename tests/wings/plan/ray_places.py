"""Where Ray places the parts of runs on machines that it only believes in, as a program:

python -m tests.wings.plan.ray_places '[[[["engine-0", 4, 1.0], ...], "pack"], ...]'

prints, for each run in JSON, the machine of each part by its name. There are three machines of 8 accelerators and
8 cores.
"""

from __future__ import annotations

import json
import sys

from headrace.launch.config import ResourceShare
from headrace.wings.cluster.ray.cluster import make_bundle

NUM_MACHINES, GPUS, CPUS = 3, 8, 8


def main() -> None:
    """Start the cluster, and reserve the parts of one run after the other."""
    import ray
    from ray.cluster_utils import Cluster

    small = {"num_cpus": CPUS, "num_gpus": GPUS, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    for _ in range(NUM_MACHINES - 1):
        cluster.add_node(**small)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    found = []
    for parts, strategy in json.loads(sys.argv[1]):
        bundles = [make_bundle(ResourceShare(cpus=cpus, gpus=gpus)) for _, gpus, cpus in parts]
        group = ray.util.placement_group(bundles, strategy.upper())
        assert group.wait(60)
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        found.append({name: nodes[place] for place, (name, _, _) in enumerate(parts)})
        ray.util.remove_placement_group(group)
        while ray.available_resources().get("GPU") != NUM_MACHINES * GPUS:
            pass
    print(json.dumps(found), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
