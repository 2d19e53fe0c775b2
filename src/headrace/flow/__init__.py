"""The heart: pacing, staleness, buffer and ledger."""

from headrace.flow.config import FlowConfig
from headrace.flow.flow import Admission, Flow, TakenBatch

__all__ = ["Admission", "Flow", "FlowConfig", "TakenBatch"]
