"""A thread that computes the jobs of many clients in round-robin order. A key identifies a client (for training, a
model). A job is an iterator that computes one piece of work, such as a micro-batch, at each ``next``.

submit(key, job) ──▶ the jobs of a key, in order ─┐
submit(key, job) ──▶ the jobs of a key, in order ─┼─▶ one piece of the first job of each key, round and round
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

Job = Callable[[], Iterator[object]]
"""A function that returns an iterator, which computes one piece of work at each ``next``. Neither of them may raise an
error."""
_ENDED = object()


class FairThread:
    """A thread that shares its time fairly among keys: between two pieces of one key, at most one piece of each other
    key is computed."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        """Start the thread with the name ``name``. If a job raises an error, the thread calls ``on_error`` with the
        error and ends."""
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()
        """The queued jobs of each key that is in the round, in the order of the keys' turns; the first job of a key may
        run."""
        self._running: dict[str, Iterator[object]] = {}
        """The iterator of each key's first job, once it was started."""
        self._changed = threading.Condition()
        """Held while the jobs change; notified when a job is submitted and when the thread must end."""
        self._ending = False
        """Whether the thread must end after its current piece of work."""
        self._on_error = on_error
        self.idle = threading.Event()
        """An event that is set while there is no job."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, key: str, job: Job) -> None:
        """Queue ``job`` behind the other jobs of ``key``. Any thread may call this."""
        with self._changed:
            self._jobs.setdefault(key, deque()).append(job)
            self.idle.clear()
            self._changed.notify()

    @property
    def waiting(self) -> dict[str, int]:
        """The number of unfinished jobs of each key, the running one included; keys without jobs are absent."""
        with self._changed:
            return {key: len(jobs) for key, jobs in self._jobs.items()}

    def close(self) -> None:
        """End the thread after its current piece of work, and wait until it has ended. The remaining jobs are not
        computed."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """Advance the jobs in turn until :meth:`close` is called; this is the body of the thread. If a job raises an
        error, report the error and return."""
        try:
            while (key := self._next()) is not None:
                self._advance(key)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the owner must receive the error
            self._on_error(error)

    def _next(self) -> str | None:
        """Wait until there is a job, and return the key that is next in the round; ``None`` if the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._jobs)
            if self._ending:
                return None
            return next(iter(self._jobs))

    def _advance(self, key: str) -> None:
        """Compute the next piece of the first job of ``key``, and move ``key`` behind all other keys. If the job has
        ended, remove it."""
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
