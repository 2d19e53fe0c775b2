"""Where the parts of a run live: local processes with supervision."""

from headrace.launch.config import LaunchConfig
from headrace.launch.local import local_serving, local_world
from headrace.launch.order import Component, Order, World

__all__ = ["Component", "LaunchConfig", "Order", "World", "local_serving", "local_world"]
