"""The controller: four concurrent loops that run episodes, score them, train the learner and synchronise weights. It
uses the engine, the learner and the scorers through their contracts, wherever they run."""

from headrace.control.config import ControlSettings, RunSection
from headrace.control.controller import Controller
from headrace.control.metrics import Summary
from headrace.control.parts import Components, Serving

__all__ = ["Components", "ControlSettings", "Controller", "RunSection", "Serving", "Summary"]
