"""The handling of signals that stop a run: at the first signal, the run stops after its present step with a checkpoint;
at the second signal, it stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopRequest:
    """A request to stop the run after its present step, which the run checks before every step."""

    requested: bool = False
    """Whether the run is to stop after its present step."""
    signal: str = ""
    """The name of the signal, such as ``SIGINT``; empty if the stop was not requested by a signal."""


@contextmanager
def stopping_on_signals(stop: StopRequest, tell: Callable[[str], None]) -> Iterator[None]:
    """During the body of ``with``, set ``stop`` at the first Ctrl-C, SIGTERM or SIGHUP (unless SIGHUP is ignored, as
    under nohup), and call ``tell`` with a line for the user; raise ``KeyboardInterrupt`` at a further Ctrl-C or
    SIGTERM. Only the main thread can handle signals; in another thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        """Handle a signal: at the first, let the run stop after its present step; raise ``KeyboardInterrupt`` at a
        further one."""
        name = signal.Signals(number).name
        if not stop.requested:
            stop.requested, stop.signal = True, name
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
