"""What a run would be like on a cluster, before it is begun: costs, a simulator around the real flow, and advice.

cluster, model ──▶ sizing ──▶ system ──▶ world ──▶ simulator ──▶ outcome ──▶ search ──▶ words
   catalogue                    ▲                     │
                      calibration of a run          the real Flow
"""

from headrace.wings.plan.cluster import Cluster, ClusterFile, load_cluster
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.planning import make_site, plan
from headrace.wings.plan.search import SearchResult, Tried
from headrace.wings.plan.simulator import Simulation
from headrace.wings.plan.sizing import SizingRequest
from headrace.wings.plan.workload import Workload
from headrace.wings.plan.world import World

__all__ = [
    "Cluster",
    "ClusterFile",
    "SearchResult",
    "SimulatedOutcome",
    "Simulation",
    "SizingRequest",
    "Tried",
    "Workload",
    "World",
    "load_cluster",
    "make_site",
    "plan",
]
