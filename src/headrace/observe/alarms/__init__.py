"""Alarms: each a small state machine over steps, or over the present moment, with advice; and whoever asks them."""

from headrace.observe.alarms.base import Alarm, Raised
from headrace.observe.alarms.config import AlarmsConfig
from headrace.observe.alarms.rows import ALARMS
from headrace.observe.alarms.watch import AlarmWatch

__all__ = ["ALARMS", "Alarm", "AlarmWatch", "AlarmsConfig", "Raised"]
