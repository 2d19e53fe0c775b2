"""The controller: four loops over contracts; it does not know where engine, learner and scorers run."""

from headrace.control.config import RunSection, Settings
from headrace.control.controller import Controller
from headrace.control.observer import Observer
from headrace.control.parts import Parts, Serving
from headrace.control.summary import Summary

__all__ = ["Controller", "Observer", "Parts", "RunSection", "Serving", "Settings", "Summary"]
