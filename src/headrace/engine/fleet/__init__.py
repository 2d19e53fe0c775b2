"""A fleet: several engines behind the interface of one engine. It routes requests and handles engines that join, leave
and commit new weights."""

from headrace.engine.config import FleetConfig
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.router import Router, RouteRequest

__all__ = ["Fleet", "FleetConfig", "RouteRequest", "Router"]
