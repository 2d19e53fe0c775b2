"""Alarms: each a small state machine over steps, or over the present moment, with advice; and whoever asks them."""

from headrace.run.observe.alarms.base import Alarm, Raised
from headrace.run.observe.alarms.config import AlarmsConfig
from headrace.run.observe.alarms.rows import ALARMS
from headrace.run.observe.alarms.watch import AlarmWatch

__all__ = ["ALARMS", "Alarm", "AlarmWatch", "AlarmsConfig", "Raised"]
