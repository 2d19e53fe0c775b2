"""The planner (``headrace plan``): predicts the speed and the memory of a run on a cluster, with cost models and a
simulator around the real flow, and searches for better settings.

    cluster, model ──▶ sizing ──▶ system ──▶ world ──▶ simulator ──▶ outcome ──▶ search ──▶ words
       catalogue                    ▲                     │
                          calibration of a run          the real Flow
"""

from typing import TYPE_CHECKING

from headrace.base.plugins import lazy_attributes

if TYPE_CHECKING:
    from headrace.wings.plan.cluster import Cluster, ClusterFile, load_cluster
    from headrace.wings.plan.outcome import SimulatedOutcome
    from headrace.wings.plan.planning import make_site, plan
    from headrace.wings.plan.search import PlanRow, SearchResult
    from headrace.wings.plan.simulator import Simulation
    from headrace.wings.plan.sizing import SizingRequest
    from headrace.wings.plan.workload import Workload
    from headrace.wings.plan.world import World

__all__ = [
    "Cluster",
    "ClusterFile",
    "PlanRow",
    "SearchResult",
    "SimulatedOutcome",
    "Simulation",
    "SizingRequest",
    "Workload",
    "World",
    "load_cluster",
    "make_site",
    "plan",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Cluster": ".cluster",
        "ClusterFile": ".cluster",
        "SearchResult": ".search",
        "SimulatedOutcome": ".outcome",
        "Simulation": ".simulator",
        "SizingRequest": ".sizing",
        "PlanRow": ".search",
        "Workload": ".workload",
        "World": ".world",
        "load_cluster": ".cluster",
        "make_site": ".planning",
        "plan": ".planning",
    },
)
