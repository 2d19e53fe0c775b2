"""The flow of groups: pacing, the staleness bound, the buffer of scored groups, and the ledger."""

from headrace.flow.config import FlowConfig
from headrace.flow.flow import Admission, Flow, TakenBatch

__all__ = ["Admission", "Flow", "FlowConfig", "TakenBatch"]
