"""One thread that computes for many, a piece of each in turn.

submit(key, job) ──▶ the jobs of a key, in order ─┐
submit(key, job) ──▶ the jobs of a key, in order ─┼─▶ one piece of the first job of each key, round and round
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

Job = Callable[[], Iterator[object]]
"""Work whose iterator computes one piece each time it is advanced. It must not raise."""
_ENDED = object()


class Turns:
    """A thread that shares its time fairly: no key waits longer for its next piece than one piece of each other key
    takes."""

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        """Start the thread. ``failed`` is called, in the thread, if a job raises; the thread ends then."""
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: dict[str, Iterator[object]] = {}
        self._changed = threading.Condition()
        self._ending = False
        self._failed = failed
        self.idle = threading.Event()
        """Set while there is no job."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, key: str, job: Job) -> None:
        """Queue ``job`` behind those of the same key. May be called from any thread."""
        with self._changed:
            self._jobs.setdefault(key, deque()).append(job)
            self.idle.clear()
            self._changed.notify()

    @property
    def waiting(self) -> dict[str, int]:
        """The number of jobs of each key that have any, the running one among them."""
        with self._changed:
            return {key: len(jobs) for key, jobs in self._jobs.items()}

    def close(self) -> None:
        """End the thread after its present piece; jobs that are left are not computed."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """Advance the jobs in turn until there will be no more; this is the body of the thread. An error ends it, and
        is reported."""
        try:
            while (key := self._next()) is not None:
                self._advance(key)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever waits must hear of it
            self._failed(error)

    def _next(self) -> str | None:
        """Return the key whose turn it is; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._jobs)
            if self._ending:
                return None
            return next(iter(self._jobs))

    def _advance(self, key: str) -> None:
        """Compute the next part of the first job of ``key``, and put ``key`` last, behind those that came meanwhile. If
        the job has ended, remove it."""
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = self._jobs[key][0]()
        goes_on = next(running, _ENDED) is not _ENDED
        with self._changed:
            self._jobs.move_to_end(key)
            if goes_on:
                return
            del self._running[key]
            jobs = self._jobs[key]
            jobs.popleft()
            if not jobs:
                del self._jobs[key]
            if not self._jobs:
                self.idle.set()
