"""Alarms, which warn the user of a problem in a run, or stop the run: their contract, their settings, the alarms of
Headrace, and the observer that checks them."""

from headrace.run.observe.alarms.base import AlarmsConfig, Raised
from headrace.run.observe.alarms.rows import ALARMS, AlarmWatch

__all__ = ["ALARMS", "AlarmWatch", "AlarmsConfig", "Raised"]
