"""All models of a server: their requests in order, each exactly once, whatever happens to the process.

    accept ──▶ journal ──▶ acknowledged        (a repeated request is acknowledged again, and nothing else happens)
       └──▶ waits until every earlier seq_id is there ──▶ turns ──▶ computed ──▶ result, in one transaction

A tenant is the state of a model in memory. The state of a model that no one has used for long is on the disk alone. To
come back, its last copy is read and the requests after it are computed again; the same data in the same micro-batches
give the same bits.
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
"""Seconds for which a client can fetch a result again after it fetched it first."""
MISSING, MISSING_S = "missing", 120.0
"""The kind of a request that its client has numbered but that the server does not have, with the reason as its body if
it is known; and the seconds after which a request that has not arrived is given up. A client numbers a request before
it checks it, and one that it then does not send would be waited for without end."""
COPY_S = 10.0
"""A model is copied to the disk at the first optimizer step after this many seconds of computing, so that a restart
does not have to repeat more."""


@dataclass(slots=True, kw_only=True)
class Order:
    """The order of one model's requests: which have arrived, and which is computed next."""

    base: FrozenBase
    """The base that it trains on."""
    next_seq: int
    """The number of the next request to submit for computing, once it has arrived."""
    waiting: set[int] = field(default_factory=set)
    """The numbers of requests that have arrived before an earlier one did."""
    missing_since_s: float | None = None
    """The time, by the clock, since which requests wait for one that has not arrived; ``None`` if none waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a request, with the changes that belong to it."""

    result: bytes
    """The encoded answer for the client."""
    write: Callable[[], None] | None = None
    """A function that changes the journal, called in the transaction that writes the result; ``None`` for no change."""
    copy: bool = False
    """Whether the model's state must be copied to the disk before the result is written."""


NOT_WRITTEN = (OSError, SafetensorError, sqlite3.OperationalError)
"""The errors of a disk that is full or cannot be written: requests wait until it can be."""

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
        """Make the manager, which computes nothing before :meth:`resume`. ``directory`` is the state directory, and
        ``bases`` are the base models by name."""
        self._journal, self._directory, self._bases, self._turns = journal, directory, bases, turns
        self._clock, self._max_resident = clock, max_resident
        self._live: OrderedDict[str, Tenant] = OrderedDict()  # used by the turns' thread alone, as is the next
        self._busy: set[str] = set()
        self._held: dict[str, list[int]] = {}  # the requests of each model that wait until the disk can be written
        self._orders: dict[str, Order] = {}
        self._lock = threading.Lock()
        self.perform: Perform
        """The function that computes a request; set before :meth:`resume`."""
        self.ended: Callable[[JournalEntry], object] = lambda entry: None
        """The function that is called, in the thread of the turns, when a request has its result."""

    def resume(self) -> None:
        """Continue with the requests that were acknowledged and not computed before the server ended. Those of models
        whose base is not served now wait for a server that has it."""
        for row in self._journal.all("SELECT id, spec FROM models"):
            model, base = row["id"], self._bases.get(json.loads(row["spec"])["base"])
            if base is None:
                continue
            waiting = "SELECT seq, status FROM requests WHERE model = ? ORDER BY seq"
            order = self._orders[model] = Order(base=base, next_seq=0)
            for entry in self._journal.all(waiting, model):
                if entry["status"] == WAITING:
                    order.waiting.add(entry["seq"])
                else:
                    order.next_seq = entry["seq"] + 1
            self._submit_ready(model, order)

    def accept(self, entry: JournalEntry) -> None:
        """Write a request to the journal, and compute it when all earlier ones of its model have been. A request whose
        number the journal has already changes nothing."""
        new = self._journal.accept(entry, self._clock.wall())
        if not new:
            return
        with self._lock:
            order = self._order(entry.model)
            order.waiting.add(entry.seq)
            self._submit_ready(entry.model, order)

    def give_up_missing(self) -> None:
        """Let requests fail that have not arrived for :data:`MISSING_S` although later ones of their model wait for
        them. If such a request arrives after all, its client gets that failure."""
        now_s = self._clock.now()
        with self._lock:
            late = [
                (model, seq)
                for model, order in self._orders.items()
                if order.missing_since_s is not None and now_s - order.missing_since_s > MISSING_S
                for seq in range(order.next_seq, min(order.waiting))
            ]
        for model, seq in late:
            self.accept(JournalEntry(model=model, seq=seq, kind=MISSING, body=b"", status=WAITING))

    def retry_held(self) -> None:
        """Compute the requests again whose results could not be written to the disk. The server calls this every few
        seconds."""

        def job(model: str) -> Iterator[object]:
            """Compute the waiting requests of ``model`` in order."""
            for seq in self._held.pop(model, []):
                yield from self._job(model, seq)

        for model in list(self._held):
            self._turns.submit(self._key(model), partial(job, model))

    def next_seq(self, model: str) -> int:
        """Return the number of the request of a model that is to be submitted next; 0 for a model without requests."""
        order = self._orders.get(model)
        return 0 if order is None else order.next_seq

    def park(self, model: str) -> None:
        """Move a model from memory to the disk, after the requests that can be computed now."""

        def job() -> Iterator[object]:
            """Move the model; if the disk cannot be written, it stays in memory."""
            try:
                self._evict(model)
            except NOT_WRITTEN as error:
                log.warning("%s stays in memory: %s", model, error)
            yield None

        if model in self._orders:
            self._turns.submit(self._key(model), job)

    def waiting(self, model: str) -> int:
        """Return the number of a model's requests that have been acknowledged but not computed."""
        row = self._journal.one("SELECT count(*) AS n FROM requests WHERE model = ? AND status = ?", model, WAITING)
        return 0 if row is None else int(row["n"])

    def copy_all(self) -> None:
        """Write every model in memory to the disk, at the end of the server. The thread of the turns must have ended. A
        model in the middle of a request is not written: the journal restores it."""
        for model in list(self._live):
            if model not in self._busy:
                try:
                    self._evict(model)
                except NOT_WRITTEN as error:
                    log.warning("%s is not on the disk, and is computed again at the next start: %s", model, error)

    def _order(self, model: str) -> Order:
        """Return the order of a model's requests. For a model that is new since the server started, one that begins
        with request 0 is made."""
        if model not in self._orders:
            row = self._journal.one("SELECT spec FROM models WHERE id = ?", model)
            assert row is not None, "requests of unknown models are refused"
            self._orders[model] = Order(base=self._bases[json.loads(row["spec"])["base"]], next_seq=0)
        return self._orders[model]

    def _submit_ready(self, model: str, order: Order) -> None:
        """Submit the waiting requests of ``model`` whose predecessors have all arrived, in order. If one is missing,
        note the time since when."""
        first = order.next_seq
        while order.next_seq in order.waiting:
            order.waiting.discard(order.next_seq)
            seq = order.next_seq
            order.next_seq += 1
            self._turns.submit(self._key(model), partial(self._job, model, seq))
        if not order.waiting:
            order.missing_since_s = None
        elif order.missing_since_s is None or order.next_seq > first:
            order.missing_since_s = self._clock.now()

    def _key(self, model: str) -> str:
        """Return the key under which a model's requests take turns with those of others. Models of a base that one of
        them trains at a time share a key, so that none is half-way through a request when another begins."""
        base = self._orders[model].base
        return f"{base.path}" if base.compute.kind.alone else model

    def _job(self, model: str, seq: int) -> Iterator[object]:
        """Compute one request of ``model``, as an iterator that yields between its pieces. Before it, the other models
        of a base that one model trains at a time are moved to the disk; after it, if too many are in memory, the models
        that were used longest ago. If the disk cannot be written, this request and those that follow wait for
        :meth:`retry_held`."""
        if model in self._held:
            self._held[model].append(seq)
            return
        base = self._orders[model].base
        self._busy.add(model)
        try:
            if base.compute.kind.alone:
                for each in [one for one in self._live if one != model and self._orders[one].base is base]:
                    self._evict(each)
            yield from self._compute_entry(model, seq)
        except NOT_WRITTEN as error:
            self._live.pop(model, None)  # it is a request ahead of the journal, from which it comes back
            self._held[model] = [seq]
            log.warning("request %d of %s waits until the disk can be written: %s", seq, model, error)
            return
        finally:
            self._busy.discard(model)
        idle = [each for each in self._live if each not in self._busy]
        for each in idle[: max(0, len(self._live) - self._max_resident)]:
            try:
                self._evict(each)
            except NOT_WRITTEN as error:
                log.warning("%s stays in memory: %s", each, error)

    def _compute_entry(self, model: str, seq: int) -> Iterator[object]:
        """Restore the model's state, compute the request ``seq`` and record its result. If the request fails because
        of what it asks for, the gradients are put back as they were before. If the server fails, the state is restored
        from the journal for the next request, as if this one had never come."""
        entry = self._journal.entry(model, seq)
        assert entry is not None, "only what is in the journal is submitted"
        if entry.status != WAITING:  # it was held after its result was written
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
            status, answer = FAILED, Answer(result=failure(error))
            if not is_of_server(error):
                if tenant is not None and gradients is not None:
                    tenant.put_back(gradients)
            else:
                tenant = None
                self._live.pop(model, None)  # what is half done is left: the state comes back from the journal
                answer = replace(answer, write=partial(self._journal.set_kind, model, seq, MISSING))
        assert answer is not None, "a request ends with an answer"
        self._end(tenant, entry, status, answer, self._clock.now() - started_s)

    def _end(self, tenant: Tenant | None, entry: JournalEntry, status: str, answer: Answer, took_s: float) -> None:
        """Record the result of a request and the journal's changes that belong to it in one transaction. The state is
        copied to the disk before, if the request asks for that or if computing it again would take long; ``took_s`` are
        the seconds that this request took."""
        copied: str | None = None
        if tenant is not None:
            tenant.seq, tenant.cost_s = entry.seq, tenant.cost_s + took_s
            due = entry.kind == "optim_step" and tenant.cost_s > COPY_S
            copied = self._copy(entry.model, tenant) if due or (answer.copy and status == DONE) else None
        with self._journal.transaction():
            if answer.write is not None:
                answer.write()
            if copied is not None:
                self._point(entry.model, copied, entry.seq)
            self._journal.end(entry.model, entry.seq, status, answer.result)
            if status == DONE and entry.kind == "forward_backward" and _reads_only(entry):
                self._journal.drop_body(entry.model, entry.seq)
            self._journal.run("UPDATE models SET used_s = ? WHERE id = ?", self._clock.wall(), entry.model)
        if tenant is not None:
            self._live.move_to_end(entry.model)
        self.ended(entry)
        if copied is not None:
            self._clean(entry.model, copied, entry.seq)

    def _restore_for(self, entry: JournalEntry) -> Iterator[object]:
        """Bring the state that ``entry`` is to be computed on into memory. A request that loads other weights can do
        without a state that is lost."""
        try:
            yield from self._restore(entry.model, entry.seq)
        except StateLost:
            if entry.kind != "load_weights":
                raise

    def _restore(self, model: str, seq: int) -> Iterator[object]:
        """Bring the state of a model before the request ``seq`` into memory, if it is not there: read its last copy,
        and compute the later requests again. Raises :class:`StateLost` if that fails."""
        if model in self._live:
            return
        row = self._journal.one("SELECT copy, copied_seq, spec FROM models WHERE id = ?", model)
        assert row is not None, "requests of unknown models are refused"
        if row["copy"] is not None:
            compute = self._orders[model].base.compute
            try:
                directory = self._place(model) / row["copy"]
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
        """Repeat the effect that the finished request ``entry`` had on the state of ``model``; the iterator yields
        between micro-batches, so that other models get their turns. Requests that only read the state are skipped, and
        so are failed ones, which left the state unchanged; but a failed optimizer step is repeated, because it
        discarded the gradient."""
        changes = entry.kind in ("create_model", "optim_step") or (  # a load is copied to the disk at once
            entry.kind == "forward_backward" and not _reads_only(entry)
        )
        failed_step = entry.kind == "optim_step" and entry.status == FAILED  # which drops a broken gradient
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
        """Remove a model from memory, after a copy of its state is on the disk. Raises an error of :data:`NOT_WRITTEN`
        if the copy cannot be written; the model then stays."""
        tenant = self._live.get(model)
        if tenant is None:
            return
        row = self._journal.one("SELECT copied_seq FROM models WHERE id = ?", model)
        if row is None or row["copied_seq"] != tenant.seq:  # a copy in use is never written anew: a kill would lose it
            copied = self._copy(model, tenant)
            with self._journal.transaction():
                self._point(model, copied, tenant.seq)
            self._clean(model, copied, tenant.seq)
        del self._live[model]

    def _copy(self, model: str, tenant: Tenant) -> str:
        """Write the state of a model to the disk, and return the name of the copy. The journal does not refer to it
        yet."""
        name = f"copy-{tenant.seq}"
        write_state(self._place(model) / name, tenant.state(gradients=True), base=str(tenant.spec["base"]))
        tenant.cost_s = 0.0
        return name

    def _point(self, model: str, copied: str, seq: int) -> None:
        """Record in the journal that the copy ``copied`` holds the state of a model after the request ``seq``."""
        self._journal.run("UPDATE models SET copy = ?, copied_seq = ? WHERE id = ?", copied, seq, model)

    def _clean(self, model: str, copied: str, seq: int) -> None:
        """Delete what the copy ``copied`` makes unnecessary: the bodies of the model's requests up to ``seq``, results
        that the client fetched long ago, and older copies."""
        self._journal.forget_before(model, seq, self._clock.wall() - RESULT_S)
        for old in self._place(model).glob("copy-*"):
            if old.name != copied:
                shutil.rmtree(old)

    def _place(self, model: str) -> Path:
        """Return the directory of a model's files."""
        return place_of(self._directory, model)


def place_of(directory: Path, model: str) -> Path:
    """Return the directory of a model's files below the state directory of the server."""
    return directory / "runs" / model.replace(":", "_")


class StateLost(RunError):
    """The error of a model whose state cannot be restored from the disk and the journal."""

    def __init__(self, model: str, error: HeadraceError) -> None:
        """Make the error for ``model``, whose state cannot be restored because of ``error``."""
        super().__init__(
            f"the state of {model} cannot be restored: {error.problem}",
            remedy="put its files back, or load one of its checkpoints into a new model",
        )


def is_of_server(error: Exception) -> bool:
    """Return whether a request failed by a fault of the server, and not because of what it asks for."""
    return isinstance(error, StateLost) or not isinstance(error, HeadraceError)


def failure(error: Exception) -> bytes:
    """Return the JSON answer to a request that failed by ``error``; its category says whose fault it is."""
    category = "server" if is_of_server(error) else "user"
    words = f"the server failed: {type(error).__name__}: {error}"
    if isinstance(error, HeadraceError):
        words = f"{error.problem}; {error.remedy}"
    return json.dumps({"error": words, "category": category}).encode()


def answer_of(value: dict[str, Any], **more: Any) -> Answer:
    """Return the answer with the JSON of ``value``; ``more`` are other fields of :class:`Answer`."""
    return Answer(result=json.dumps(value).encode(), **more)


def _reads_only(entry: JournalEntry) -> bool:
    """Return whether a ``forward_backward`` request that has been computed asked for no gradient, so that it left the
    state unchanged. The body of such a request is deleted."""
    return not entry.body or wire.is_forward_only(entry.body)
