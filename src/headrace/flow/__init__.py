"""The flow of groups: when each group of episodes starts, when it is trained, and the durable record of both.

It contains the settings (``[flow]``), pacing, staleness policies, filters, the buffer of scored groups, and the ledger.
"""

from headrace.flow.config import FlowConfig
from headrace.flow.flow import Admission, Flow, GroupBatch

__all__ = ["Admission", "Flow", "FlowConfig", "GroupBatch"]
