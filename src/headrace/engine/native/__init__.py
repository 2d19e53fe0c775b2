"""The embedded engine."""

from headrace.engine.native.engine import NativeEngine
from headrace.engine.native.swaps import WeightReceiver

__all__ = ["NativeEngine", "WeightReceiver"]
