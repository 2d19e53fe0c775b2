"""The embedded engine."""

from headrace.engine.native.engine import NativeEngine, WeightReceiver

__all__ = ["NativeEngine", "WeightReceiver"]
