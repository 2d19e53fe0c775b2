"""The manager of all models in training on a server. It computes the requests of each model in order and exactly once,
even if the process is killed.

    accept ──▶ journal ──▶ acknowledged        (a repeated request is acknowledged again, and nothing else happens)
       └──▶ waits until every earlier seq_id is there ──▶ turns ──▶ computed ──▶ result, in one transaction

A tenant is the training state of one model in memory. The state of a model that was not used for long is only on the
disk. It is restored from its last copy, and the requests after that copy are computed again; the same data in the same
micro-batches result in the same bits.
"""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from headrace.base.clock import Clock
from headrace.base.errors import DataError, HeadraceError, RunError
from headrace.wings.tinker import wire
from headrace.wings.tinker.compute import FrozenBase
from headrace.wings.tinker.fair_thread import FairThread
from headrace.wings.tinker.files import read_state, write_state
from headrace.wings.tinker.journal import DONE, FAILED, WAITING, Journal, JournalEntry
from headrace.wings.tinker.tenant import Tenant

RESULT_S = 600.0
"""Seconds after the first fetch of a result for which the client can fetch the result again."""
MISSING, MISSING_S = "missing", 120.0
"""The kind of a journal entry for a request that did not arrive (its body is the reason, if known), and the seconds
after which the server stops waiting for such a request. A client assigns the number of a request before it validates
the request. If the client then does not send it, later requests of the model would wait for ever."""
COPY_S = 10.0
"""Seconds of computing after which the next optimizer step copies a model to the disk. The limit bounds the work that a
restart has to repeat."""


@dataclass(slots=True, kw_only=True)
class ModelQueue:
    """The queue state of one model: the requests that have arrived, and the number of the request that is computed
    next."""

    base: FrozenBase
    """The base model that the model trains on."""
    next_seq: int
    """The number of the next request to submit for computing, once it has arrived."""
    waiting: set[int] = field(default_factory=set)
    """The numbers of requests that have arrived although an earlier request has not."""
    missing_since_s: float | None = None
    """The time, by the clock, since which requests have waited for an earlier request that has not arrived; ``None`` if
    no request waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a computed request, with the changes that must be stored together with it."""

    result: bytes
    """The encoded answer for the client."""
    write: Callable[[], None] | None = None
    """A function that changes the journal, called in the transaction that writes the result; ``None`` for no change."""
    copy: bool = False
    """Whether the model's state must be copied to the disk before the result is written."""


NOT_WRITTEN = (OSError, SafetensorError, sqlite3.OperationalError)
"""The errors of a disk that is full or not writable. Requests that fail with one of them wait until the disk can be
written."""

log = logging.getLogger("headrace")

Perform = Callable[[Tenant | None, JournalEntry], Iterator[Answer | Tenant | None]]
"""A function that computes one request, given the model's state (``None`` before its creation) and the request. Its
iterator yields ``None`` after each piece of work, a tenant if it makes a new state, and an :class:`Answer` at the end,
which is ignored when a request is computed again to restore the state."""


class Tenants:
    """The manager of all models in training of a server: it puts their requests in order, computes them in the thread
    ``turns``, keeps at most ``max_resident`` idle models in memory, and restores others from the disk. :meth:`accept`
    may be called from any thread."""

    def __init__(
        self,
        journal: Journal,
        directory: Path,
        bases: Mapping[str, FrozenBase],
        turns: FairThread,
        *,
        clock: Clock,
        max_resident: int,
    ) -> None:
        """Create the manager, which computes nothing before :meth:`resume`. ``journal`` records the requests and their
        results, ``directory`` is the state directory, ``bases`` are the base models by name, and ``clock`` gives the
        time."""
        self._journal, self._directory, self._bases, self._turns = journal, directory, bases, turns
        self._clock, self._max_resident = clock, max_resident
        self._live: OrderedDict[str, Tenant] = OrderedDict()
        """The models in memory, the least recently used first; only the computing thread uses it."""
        self._computing: set[str] = set()
        """The models in the middle of a request; only the computing thread uses it."""
        self._held_requests: dict[str, list[int]] = {}
        """The numbers of requests that wait until the disk can be written, by model."""
        self._queues: dict[str, ModelQueue] = {}
        """The queue state of each model with requests since the start."""
        self._lock = threading.Lock()
        """Held while the queues or the held requests change, since any thread may change them."""
        self.perform: Perform
        """The function that computes a request; it must be set before :meth:`resume`."""
        self.on_ended: Callable[[JournalEntry], object] = lambda entry: None
        """A callback that the computing thread calls with a request whose result has been written."""

    def resume(self) -> None:
        """Submit the requests that an earlier server process acknowledged but did not compute. Requests of models whose
        base this server does not serve stay in the journal."""
        for row in self._journal.all("SELECT id, spec FROM models"):
            model, base = row["id"], self._bases.get(json.loads(row["spec"])["base"])
            if base is None:
                continue
            waiting = "SELECT seq, status FROM requests WHERE model = ? ORDER BY seq"
            queue = self._queues[model] = ModelQueue(base=base, next_seq=0)
            for entry in self._journal.all(waiting, model):
                if entry["status"] == WAITING:
                    queue.waiting.add(entry["seq"])
                else:
                    queue.next_seq = entry["seq"] + 1
            self._submit_ready(model, queue)

    def accept(self, entry: JournalEntry) -> None:
        """Write the request ``entry`` to the journal, and compute it after all earlier requests of its model. If the
        journal already has a request with this number, do nothing."""
        new = self._journal.accept(entry, self._clock.wall())
        if not new:
            return
        with self._lock:
            queue = self._get_queue(entry.model)
            queue.waiting.add(entry.seq)
            self._submit_ready(entry.model, queue)

    def give_up_missing(self) -> None:
        """Record requests as failed that have not arrived for :data:`MISSING_S` while later requests of their model
        waited for them. If such a request arrives afterwards, its client receives that failure."""
        now_s = self._clock.now()
        with self._lock:
            late = [
                (model, seq)
                for model, queue in self._queues.items()
                if queue.missing_since_s is not None and now_s - queue.missing_since_s > MISSING_S
                for seq in range(queue.next_seq, min(queue.waiting))
            ]
        for model, seq in late:
            self.accept(JournalEntry(model=model, seq=seq, kind=MISSING, body=b"", status=WAITING))

    def retry_held(self) -> None:
        """Submit the requests again whose results could not be written to the disk. The server calls this every few
        seconds."""

        def job(model: str) -> Iterator[object]:
            """Compute the waiting requests of ``model`` in order."""
            for seq in self._held_requests.pop(model, []):
                yield from self._run_request(model, seq)

        for model in list(self._held_requests):
            self._turns.submit(self._turn_key(model), partial(job, model))

    def next_seq(self, model: str) -> int:
        """Return the number of the next request of ``model`` that will be submitted for computing; 0 for a model
        without requests."""
        queue = self._queues.get(model)
        return 0 if queue is None else queue.next_seq

    def park(self, model: str) -> None:
        """Move a model from memory to the disk, after the requests that are already submitted for it."""

        def job() -> Iterator[object]:
            """Move the model to the disk; if the disk cannot be written, keep the model in memory."""
            try:
                self._evict(model)
            except NOT_WRITTEN as error:
                log.warning("%s stays in memory: %s", model, error)
            yield None

        if model in self._queues:
            self._turns.submit(self._turn_key(model), job)

    def waiting(self, model: str) -> int:
        """Return the number of a model's requests that have been acknowledged but not computed."""
        row = self._journal.one("SELECT count(*) AS n FROM requests WHERE model = ? AND status = ?", model, WAITING)
        return 0 if row is None else int(row["n"])

    def copy_all(self) -> None:
        """Write every model in memory to the disk when the server ends; the computing thread must have ended before. A
        model in the middle of a request is not written, because the next start restores it from the journal."""
        for model in list(self._live):
            if model not in self._computing:
                try:
                    self._evict(model)
                except NOT_WRITTEN as error:
                    log.warning("%s is not on the disk, and is computed again at the next start: %s", model, error)

    def _get_queue(self, model: str) -> ModelQueue:
        """Return the queue state of a model. For a model that was created after the server started, create a state that
        begins with request 0."""
        if model not in self._queues:
            row = self._journal.one("SELECT spec FROM models WHERE id = ?", model)
            assert row is not None, "requests of unknown models are refused"
            self._queues[model] = ModelQueue(base=self._bases[json.loads(row["spec"])["base"]], next_seq=0)
        return self._queues[model]

    def _submit_ready(self, model: str, queue: ModelQueue) -> None:
        """Submit the waiting requests of ``model`` whose predecessors have all arrived, in order. If a predecessor of
        the others is missing, record since when."""
        first = queue.next_seq
        while queue.next_seq in queue.waiting:
            queue.waiting.discard(queue.next_seq)
            seq = queue.next_seq
            queue.next_seq += 1
            self._turns.submit(self._turn_key(model), partial(self._run_request, model, seq))
        if not queue.waiting:
            queue.missing_since_s = None
        elif queue.missing_since_s is None or queue.next_seq > first:
            queue.missing_since_s = self._clock.now()

    def _turn_key(self, model: str) -> str:
        """Return the key of a model in the computing thread, which alternates between keys. Models of a base whose
        weights are trained as a whole share one key, so that no request of one model begins in the middle of a request
        of another model."""
        base = self._queues[model].base
        return f"{base.path}" if base.compute.kind.alone else model

    def _run_request(self, model: str, seq: int) -> Iterator[object]:
        """Compute the request ``seq`` of ``model``, as an iterator that yields between its pieces. On a base whose
        weights are trained as a whole, the other models of the base are moved to the disk before. Afterwards the least
        recently used models are moved to the disk if too many are in memory. If the disk cannot be written, this
        request and the following ones wait for :meth:`retry_held`."""
        if model in self._held_requests:
            self._held_requests[model].append(seq)
            return
        base = self._queues[model].base
        self._computing.add(model)
        try:
            if base.compute.kind.alone:
                for each in [one for one in self._live if one != model and self._queues[one].base is base]:
                    self._evict(each)
            yield from self._compute_entry(model, seq)
        except NOT_WRITTEN as error:
            self._live.pop(model, None)  # the state is one request ahead of the journal, which restores it
            self._held_requests[model] = [seq]
            log.warning("request %d of %s waits until the disk can be written: %s", seq, model, error)
            return
        finally:
            self._computing.discard(model)
        idle = [each for each in self._live if each not in self._computing]
        for each in idle[: max(0, len(self._live) - self._max_resident)]:
            try:
                self._evict(each)
            except NOT_WRITTEN as error:
                log.warning("%s stays in memory: %s", each, error)

    def _compute_entry(self, model: str, seq: int) -> Iterator[object]:
        """Restore the model's state, compute the request ``seq`` and record its result. If the request itself is
        invalid, restore the gradients from before the request. If an error of the server occurs, discard the state in
        memory: the next request restores the state from the journal, without the effect of this request."""
        entry = self._journal.entry(model, seq)
        assert entry is not None, "only what is in the journal is submitted"
        if entry.status != WAITING:  # its result had been written before it was held back
            return
        tenant, gradients = None, None
        answer: Answer | None = None
        status, started_s = DONE, self._clock.now()
        try:
            if seq > 0:
                yield from self._restore_for(entry)
                tenant = self._live.get(model)
            if tenant is not None and entry.kind == "forward_backward":
                gradients = tenant.gradients()
            for piece in self.perform(tenant, entry):
                if isinstance(piece, Tenant):
                    tenant = self._live[model] = piece
                elif isinstance(piece, Answer):
                    answer = piece
                    break
                yield piece
        except Exception as error:  # noqa: BLE001 - the edge of a request: one tenant's must not end the others'
            status, answer = FAILED, Answer(result=describe_failure(error))
            if not is_server_error(error):
                if tenant is not None and gradients is not None:
                    tenant.put_back(gradients)
            else:
                tenant = None
                self._live.pop(model, None)  # the half-changed state is discarded; the journal restores it
                answer = replace(answer, write=partial(self._journal.set_kind, model, seq, MISSING))
        assert answer is not None, "a request ends with an answer"
        self._record_result(tenant, entry, status, answer, self._clock.now() - started_s)

    def _record_result(
        self, tenant: Tenant | None, entry: JournalEntry, status: str, answer: Answer, took_s: float
    ) -> None:
        """Record the ``status`` and the result (``answer``) of the request ``entry``, and the journal changes that
        belong to it, in one transaction. Before that, copy the state ``tenant`` to the disk if the answer requires it,
        or if computing the state again would take longer than :data:`COPY_S`. ``took_s`` is the computing time of this
        request in seconds."""
        copied: str | None = None
        if tenant is not None:
            tenant.seq, tenant.cost_s = entry.seq, tenant.cost_s + took_s
            due = entry.kind == "optim_step" and tenant.cost_s > COPY_S
            copied = self._write_copy(entry.model, tenant) if due or (answer.copy and status == DONE) else None
        with self._journal.transaction():
            if answer.write is not None:
                answer.write()
            if copied is not None:
                self._record_copy(entry.model, copied, entry.seq)
            self._journal.end(entry.model, entry.seq, status, answer.result)
            if status == DONE and entry.kind == "forward_backward" and _reads_only(entry):
                self._journal.drop_body(entry.model, entry.seq)
            self._journal.run("UPDATE models SET used_s = ? WHERE id = ?", self._clock.wall(), entry.model)
        if tenant is not None:
            self._live.move_to_end(entry.model)
        self.on_ended(entry)
        if copied is not None:
            self._delete_replaced(entry.model, copied, entry.seq)

    def _restore_for(self, entry: JournalEntry) -> Iterator[object]:
        """Load the state on which ``entry`` will be computed into memory. A ``load_weights`` request replaces the
        state, so an error :class:`StateLost` is ignored for it."""
        try:
            yield from self._restore(entry.model, entry.seq)
        except StateLost:
            if entry.kind != "load_weights":
                raise

    def _restore(self, model: str, seq: int) -> Iterator[object]:
        """Load the state of a model before the request ``seq`` into memory, unless it is there already: read its last
        copy, and compute the requests after that copy again. Raises :class:`StateLost` if that fails."""
        if model in self._live:
            return
        row = self._journal.one("SELECT copy, copied_seq, spec FROM models WHERE id = ?", model)
        assert row is not None, "requests of unknown models are refused"
        if row["copy"] is not None:
            compute = self._queues[model].base.compute
            try:
                directory = self._model_directory(model) / row["copy"]
                found = read_state(directory, compute.kind, compute.model.device, trained=True, moments=True)
                wanted = json.loads(row["spec"])
                if any(found.spec[key] != wanted[key] for key in ("rank", "parts")):
                    raise DataError(f"{row['copy']} is of another model", remedy="put its own files back")
            except HeadraceError as error:
                raise StateLost(model, error) from None
            self._live[model] = Tenant.restored(found, gradients=True)
            self._live[model].seq = row["copied_seq"]
        last = self._journal.one("SELECT max(seq) AS seq FROM requests WHERE model = ?", model)
        assert last is not None
        for number in range(row["copied_seq"] + 1, min(seq, (last["seq"] or 0) + 1)):
            entry = self._journal.entry(model, number)
            if entry is not None:
                yield from self._replay(model, entry)

    def _replay(self, model: str, entry: JournalEntry) -> Iterator[object]:
        """Repeat the effect of the finished request ``entry`` on the state of ``model``, as an iterator that yields
        between micro-batches, so that other models are computed in between. Skip requests that only read the state, and
        failed requests, which left the state unchanged. Repeat a failed optimizer step, however, because it discarded
        the gradient."""
        changes = entry.kind in ("create_model", "optim_step") or (  # the state after load_weights is copied at once
            entry.kind == "forward_backward" and not _reads_only(entry)
        )
        failed_step = entry.kind == "optim_step" and entry.status == FAILED  # it discarded a non-finite gradient
        if not changes or (entry.status == FAILED and not failed_step):
            return
        try:
            for piece in self.perform(self._live.get(model), entry):
                if isinstance(piece, Tenant):
                    self._live[model] = piece
                elif isinstance(piece, Answer):
                    break
                yield None
        except HeadraceError as error:
            if not failed_step:
                raise StateLost(model, error) from None
        self._live[model].seq = entry.seq

    def _evict(self, model: str) -> None:
        """Remove a model from memory after its state has been copied to the disk. Raises an error of
        :data:`NOT_WRITTEN` if the copy cannot be written; the model then stays in memory."""
        tenant = self._live.get(model)
        if tenant is None:
            return
        row = self._journal.one("SELECT copied_seq FROM models WHERE id = ?", model)
        if row is None or row["copied_seq"] != tenant.seq:  # never overwrite the copy in use: a kill would lose it
            copied = self._write_copy(model, tenant)
            with self._journal.transaction():
                self._record_copy(model, copied, tenant.seq)
            self._delete_replaced(model, copied, tenant.seq)
        del self._live[model]

    def _write_copy(self, model: str, tenant: Tenant) -> str:
        """Write the state of a model to the disk, and return the name of the copy. The caller must then record the copy
        in the journal (:meth:`_record_copy`)."""
        name = f"copy-{tenant.seq}"
        write_state(self._model_directory(model) / name, tenant.state(gradients=True), base=str(tenant.spec["base"]))
        tenant.cost_s = 0.0
        return name

    def _record_copy(self, model: str, copied: str, seq: int) -> None:
        """Record in the journal that the copy named ``copied`` contains the state of a model after the request
        ``seq``."""
        self._journal.run("UPDATE models SET copy = ?, copied_seq = ? WHERE id = ?", copied, seq, model)

    def _delete_replaced(self, model: str, copied: str, seq: int) -> None:
        """Delete the data that the copy named ``copied`` replaces: the bodies of the model's requests up to ``seq``,
        results that the client fetched long ago, and older copies."""
        self._journal.forget_before(model, seq, self._clock.wall() - RESULT_S)
        for old in self._model_directory(model).glob("copy-*"):
            if old.name != copied:
                shutil.rmtree(old)

    def _model_directory(self, model: str) -> Path:
        """Return the directory of a model's files."""
        return get_model_directory(self._directory, model)


def get_model_directory(directory: Path, model: str) -> Path:
    """Return the directory of a model's files below the state directory of the server."""
    return directory / "runs" / model.replace(":", "_")


class StateLost(RunError):
    """The error of a model whose state cannot be restored from the disk and the journal."""

    def __init__(self, model: str, error: HeadraceError) -> None:
        """Create the error for ``model``, whose state cannot be restored because of ``error``."""
        super().__init__(
            f"the state of {model} cannot be restored: {error.problem}",
            remedy="put its files back, or load one of its checkpoints into a new model",
        )


def is_server_error(error: Exception) -> bool:
    """Return whether ``error`` is a fault of the server, and not of the client's request."""
    return isinstance(error, StateLost) or not isinstance(error, HeadraceError)


def describe_failure(error: Exception) -> bytes:
    """Return the JSON answer to a request that failed with ``error``. Its field ``category`` is ``server`` or ``user``,
    according to the cause."""
    category = "server" if is_server_error(error) else "user"
    words = f"the server failed: {type(error).__name__}: {error}"
    if isinstance(error, HeadraceError):
        words = f"{error.problem}; {error.remedy}"
    return json.dumps({"error": words, "category": category}).encode()


def make_answer(value: dict[str, Any], **more: Any) -> Answer:
    """Return an :class:`Answer` whose result is ``value`` as JSON; ``more`` are its other fields."""
    return Answer(result=json.dumps(value).encode(), **more)


def _reads_only(entry: JournalEntry) -> bool:
    """Return whether a computed ``forward_backward`` request requested no gradient, so that it left the state
    unchanged. The body of such a request is deleted, so an empty body means the same."""
    return not entry.body or wire.is_forward_only(entry.body)
