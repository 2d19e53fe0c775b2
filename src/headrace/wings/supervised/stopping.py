"""The end of a run by a signal: in order, with a checkpoint, at the first; at once at the second."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopRequest:
    """Whether a run is to stop after its present step, and the signal that asked for it."""

    requested: bool = False
    by: str = ""


@contextmanager
def stopping_on_signals(stop: StopRequest, tell: Callable[[str], None]) -> Iterator[None]:
    """Set ``stop`` at the first Ctrl-C, SIGTERM or SIGHUP (unless that is ignored, as under nohup); raise
    ``KeyboardInterrupt`` at another Ctrl-C or SIGTERM. Only the main thread can do so; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        """Let the run stop after this step; raise ``KeyboardInterrupt`` at the second signal."""
        name = signal.Signals(number).name
        if not stop.requested:
            stop.requested, stop.by = True, name
            tell("stopping after this step, with a checkpoint; Ctrl-C again to end at once")
        elif number != signal.SIGHUP:
            raise KeyboardInterrupt("stopped at once; --resume goes on")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
