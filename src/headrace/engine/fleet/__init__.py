"""Several engines behind the interface of one: routing of requests, and what happens when engines join, leave and
commit."""

from headrace.engine.config import FleetConfig
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.router import Router, RouteRequest

__all__ = ["Fleet", "FleetConfig", "RouteRequest", "Router"]
