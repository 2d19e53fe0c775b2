"""The embedded engine (``engine.kind = "native"``), which computes with a Hugging Face model in its own process."""

from headrace.engine.native.engine import NativeEngine
from headrace.engine.native.swaps import WeightReceiver

__all__ = ["NativeEngine", "WeightReceiver"]
