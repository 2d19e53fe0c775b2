"""Several engines as one: who serves what, and what becomes of it when they come, go and commit."""

from headrace.engine.fleet.config import FleetConfig
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.router import Router, RouteRequest

__all__ = ["Fleet", "FleetConfig", "RouteRequest", "Router"]
