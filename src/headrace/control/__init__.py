"""The controller: four loops over contracts; it does not know where engine, learner and scorers run."""

from headrace.control.config import ControlSettings, RunSection
from headrace.control.controller import Controller
from headrace.control.metrics import Summary
from headrace.control.observer import Observer
from headrace.control.parts import Components, Serving

__all__ = ["Components", "ControlSettings", "Controller", "Observer", "RunSection", "Serving", "Summary"]
