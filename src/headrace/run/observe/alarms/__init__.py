"""Alarms: each is a small state machine over the steps or over the present state of a run, with advice. An observer
runs them."""

from headrace.run.observe.alarms.base import Alarm, AlarmsConfig, Raised
from headrace.run.observe.alarms.rows import ALARMS, AlarmWatch

__all__ = ["ALARMS", "Alarm", "AlarmWatch", "AlarmsConfig", "Raised"]
