"""The service that implements every endpoint of a server of the Tinker protocol; :mod:`.app` calls it. A model is what
one client trains. A session is one run of a client program. A sampler (sampling session) is a set of weights that a
client samples from. The server answers a request at once with a request id, with which the client polls for the result.
Requests of models are written to the journal; sampling requests are not, and clients repeat them after a restart."""

from __future__ import annotations

import asyncio
import json
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.clock import Clock
from headrace.base.errors import DataError, EngineFull, HeadraceError
from headrace.base.net.refusal import Refusal, excerpt
from headrace.base.types.episode import StopReason
from headrace.base.types.tokens import Tokens
from headrace.wings.tinker import schema, wire
from headrace.wings.tinker.base import MOST_WHOLE_SAMPLERS, ServedBase
from headrace.wings.tinker.catalog import Catalog
from headrace.wings.tinker.compute import PromptScores
from headrace.wings.tinker.config import TinkerConfig
from headrace.wings.tinker.fair_thread import FairThread
from headrace.wings.tinker.files import read_state_facts
from headrace.wings.tinker.jobs import JSON, PROTOBUF, ResultResponse, SampleJob, SampleJobs
from headrace.wings.tinker.journal import DONE, FAILED, WAITING, Journal, JournalEntry
from headrace.wings.tinker.performing import make_spec
from headrace.wings.tinker.samplers import SamplerRecord
from headrace.wings.tinker.sampling import Array, answer, make_sample_plan
from headrace.wings.tinker.tenants import MISSING, Tenants, describe_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """The components of a server that :class:`TinkerService` uses."""

    config: TinkerConfig
    """The settings of the server."""
    journal: Journal
    """The durable record of sessions, models and requests."""
    turns: FairThread
    """The thread that computes the requests of all models, one micro-batch of each model in turn."""
    tenants: Tenants
    """The models in training."""
    bases: Mapping[str, ServedBase]
    """The base models, by each name under which clients may request them."""


class TinkerService:
    """The endpoints of one server. All methods run in one event loop. The parameter ``body`` is the body of the HTTP
    request, and a dictionary that a method returns is the JSON answer. Sampling runs as tasks of ``group``."""

    def __init__(self, parts: ServiceParts, group: asyncio.TaskGroup, clock: Clock) -> None:
        """Create the service from ``parts``, inside the running event loop. ``clock`` gives the time."""
        self._parts, self._group, self._clock = parts, group, clock
        self._config, self._journal, self._bases = parts.config, parts.journal, parts.bases
        self.catalog = Catalog(parts.journal, clock)
        self._loop = asyncio.get_running_loop()
        self._result_events: dict[tuple[str, int], asyncio.Event] = {}
        """Set at the end of a request for whose result a client waits, by model and request number."""
        self._ending = self._loop.create_future()
        """Resolved when the server ends, which ends all waits."""
        self._samples = SampleJobs()
        self._heartbeats_s: dict[str, float] = {}
        """Time of the last heartbeat or request of each session that has not ended."""
        self._reserved_bases: dict[str, str] = {}
        """The model that has reserved each base whose weights are trained as a whole, by the base's directory."""
        parts.tenants.on_ended = self._end_in_thread

    # -- sessions ---------------------------------------------------------------------------------------------------

    def create_session(self, body: bytes) -> dict[str, Any]:
        """Create a session, which owns the models and samplers of one client program, and return its id."""
        request = schema.parse(body, schema.CreateSessionBody)
        session = str(uuid.uuid4())
        facts = {
            "user_metadata": request.user_metadata, "display_name": request.display_name,
            "project_id": request.project_id, "sdk": request.sdk_version,
        }  # fmt: skip
        self._journal.run(
            "INSERT INTO sessions (id, created_s, facts) VALUES (?, ?, ?)",
            session, self._clock.wall(), json.dumps(facts),
        )  # fmt: skip
        self._heartbeats_s[session] = self._clock.now()
        return {"type": "create_session", "session_id": session}

    def heartbeat(self, body: bytes) -> dict[str, Any]:
        """Record the time of a session's heartbeat. Raises :class:`Refusal` with status 410 for a session that has
        ended."""
        session = schema.parse(body, schema.SessionBody).session_id
        self._record_session_use(session, ended_status=410)
        return {"type": "session_heartbeat"}

    def finish(self, session: str) -> dict[str, Any]:
        """End a session: move its models from memory to the disk, drop its samplers, and let the unnamed weights of its
        samplers expire. Raises :class:`Refusal` with status 404 if the session does not exist."""
        if self._journal.one("SELECT id FROM sessions WHERE id = ?", session) is None:
            raise Refusal(f"there is no session {excerpt(session)}", remedy="create a ServiceClient", status=404)
        self._journal.run("UPDATE sessions SET finished = 1 WHERE id = ?", session)
        self._park(session)
        self._journal.expire_unused(self._clock.wall())
        for row in self._journal.all("SELECT id, base FROM samplers WHERE session = ?", session):
            if row["base"] in self._bases:
                self._bases[row["base"]].weights.drop(row["id"])
        return {}

    def sweep(self) -> None:
        """Move the models of sessions without a recent heartbeat to the disk, retry held and fail missing requests, and
        delete expired checkpoints and old samples. The server calls this every few seconds."""
        now = self._clock.now()
        for session, beat in list(self._heartbeats_s.items()):
            if now - beat > self._config.session_s:
                self._park(session)
        self._parts.tenants.retry_held()
        self._parts.tenants.give_up_missing()
        self._samples.forget_old(now)
        wall = self._clock.wall()
        self._journal.keep_used(self._heartbeats_s, wall, self._config.ephemeral_s)
        for row in self._journal.all("SELECT path FROM checkpoints WHERE expires_s < ?", wall):
            self.catalog.remove_checkpoint(row["path"])
        self._journal.forget_samples()

    def _park(self, session: str) -> None:
        """Cancel the sampling requests of a session, and move its models from memory to the disk. A later request of a
        model loads it again."""
        self._heartbeats_s.pop(session, None)
        for name, job in self._samples.items():
            if name.startswith(f"{session}:"):
                job.task.cancel()
        for row in self._journal.all("SELECT id FROM models WHERE session = ?", session):
            self._parts.tenants.park(row["id"])
            self._release_base(row["id"])

    def _record_session_use(self, session: str, ended_status: int = 404) -> None:
        """Record that ``session`` is alive now. Raises :class:`Refusal` with status 404 for an unknown session, and
        with the status ``ended_status`` for a session that has ended."""
        if session not in self._heartbeats_s:
            row = self._journal.one("SELECT finished FROM sessions WHERE id = ?", session)
            if row is None:
                raise Refusal(f"there is no session {excerpt(session)}", remedy="create a ServiceClient", status=404)
            if row["finished"]:
                raise Refusal(f"session {session} has ended", remedy="create a ServiceClient", status=ended_status)
        self._heartbeats_s[session] = self._clock.now()

    # -- models -----------------------------------------------------------------------------------------------------

    def create_model(self, body: bytes) -> dict[str, Any]:
        """Accept a request to create a model. The answer contains the model's id and the request id under which the
        client polls for the result."""
        request = schema.parse(body, schema.CreateModelBody)
        self._record_session_use(request.session_id)
        spec = make_spec(request, self._base(request.base_model).training)
        return self._new_model(request.session_id, request.model_seq_id, "create_model", body, spec)

    def load_weights(self, body: bytes) -> dict[str, Any]:
        """Accept a request to load a checkpoint into the model that the body names, or as a new model of the session.
        Raises :class:`Refusal` if the body names another base than the checkpoint's base."""
        new = schema.parse(body, schema.NewModel)
        if new.session_id is None or new.model_seq_id is None:
            return self.accept(body, "load_weights")
        request = schema.parse(body, schema.LoadWeightsBody)
        spec = self.catalog.spec(self.catalog.checkpoint(request.path, "weights"))
        if self._base(request.base_model or spec["base"]) is not self._base(spec["base"]):
            raise Refusal(
                f"base_model={excerpt(request.base_model or '')}: {excerpt(request.path, 200)} is of {spec['base']}",
                remedy="leave base_model out",
            )
        self._record_session_use(new.session_id)
        return self._new_model(new.session_id, new.model_seq_id, "load_weights", body, spec)

    def _new_model(self, session: str, number: int, kind: str, body: bytes, spec: dict[str, Any]) -> dict[str, Any]:
        """Record a new model with the settings ``spec``, the model number ``number`` of its session, and the request
        that creates it: request 0, of the given ``kind``, with the ``body`` that the client sent. Return the ids of the
        model and of the request. Raises :class:`Refusal` if the server already has ``max_models`` models."""
        model = f"{session}:train:{number}"
        per_session = self._journal.all("SELECT session, count(*) AS n FROM models GROUP BY session")
        held = sum(row["n"] for row in per_session if row["session"] in self._heartbeats_s)
        known = self._journal.one("SELECT id FROM models WHERE id = ?", model)
        if known is None and held >= self._config.max_models:
            raise Refusal(
                f"there are {held} models, as many as this server holds",
                remedy="close a ServiceClient, or raise --max-models",
            )
        self._reserve_base(self._base(spec["base"]), model, status=400)
        now = self._clock.wall()
        with self._journal.transaction():
            self._journal.run(
                "INSERT OR IGNORE INTO models (id, session, number, created_s, used_s, spec) VALUES (?, ?, ?, ?, ?, ?)",
                model, session, number, now, now, json.dumps(spec),
            )  # fmt: skip
            entry = JournalEntry(model=model, seq=0, kind=kind, body=body, status=WAITING)
        self._parts.tenants.accept(entry)
        return {"request_id": f"{model}:0", "model_id": model}

    def _reserve_base(self, base: ServedBase, model: str, *, status: int) -> None:
        """Reserve ``base`` for ``model`` if all its weights are trained, which only one model at a time may do; bases
        for adapters need no reservation. Raises :class:`Refusal` with ``status`` if another model has reserved the
        base."""
        if not base.training.compute.kind.alone or self._creation_failed(model):
            return
        holder = self._reserved_bases.setdefault(str(base.training.path), model)
        if holder != model:
            raise Refusal(
                f"{base.names[0]} trains all its weights for one model at a time, and now for {holder}",
                remedy="close its ServiceClient first, or train adapters of another name",
                status=status,
            )

    def _release_base(self, model: str) -> None:
        """End the reservation of a base for ``model``, if there is such a reservation."""
        for base, holder in list(self._reserved_bases.items()):
            if holder == model:
                del self._reserved_bases[base]

    def _creation_failed(self, model: str) -> bool:
        """Return whether the creation of ``model`` failed."""
        made = self._journal.outcome(model, 0)
        return made is not None and made.status == FAILED

    def get_info(self, body: bytes) -> dict[str, Any]:
        """Return the description of a model for its client: base, architecture, tokenizer and rank."""
        model = schema.parse(body, schema.ModelBody).model_id
        spec = json.loads(self.catalog.model(model)["spec"])
        base = self._base(spec["base"])
        data = {"arch": base.architecture, "model_name": spec["base"], "tokenizer_id": str(base.training.path)}
        return {
            "type": "get_info",
            "model_id": model,
            "model_data": data,
            "is_lora": spec["rank"] is not None,
            "lora_rank": spec["rank"],
            "model_name": spec["base"],
            "optimizer_config": {"type": "adamw"},
        }

    def train(self, body: bytes) -> dict[str, Any]:
        """Accept a forward_backward request, whose body is a protobuf message, and return its request id."""
        model, seq = wire.read_model_and_seq(body)
        return self._accept(model, seq, "forward_backward", body)

    def refuse(self, read_model_and_seq: Callable[[bytes], tuple[str, int]], beginning: bytes, error: Refusal) -> None:
        """Record a request with a too long body as failed with ``error``, so that no later request waits for it.
        ``read_model_and_seq`` reads the model and the request's number from the ``beginning`` of the body."""
        try:
            model, seq = read_model_and_seq(beginning)
            self._accept(model, seq, MISSING, f"{error.problem}\n{error.remedy}".encode())
        except HeadraceError:
            return  # no place is known, or no such model

    def accept(self, body: bytes, kind: str) -> dict[str, Any]:
        """Accept the request in the JSON ``body`` to the endpoint ``kind`` (as ``optim_step``), and return its request
        id. Errors in the body are reported in the result, because later requests of the model wait for this result."""
        request = schema.parse(body, schema.ModelRequest)
        return self._accept(request.model_id, request.seq_id, kind, body)

    def _accept(self, model: str, seq: int, kind: str, body: bytes) -> dict[str, Any]:
        """Write the request ``seq`` of a model to the journal, and return the request id under which the client polls
        for its result. ``kind`` names its endpoint. Raises :class:`Refusal` for a number out of range, and with status
        429 if too many requests wait or another model has reserved the base."""
        row = self.catalog.model(model)
        base = self._find_base(row)
        self._record_session_use(row["session"])
        due = self._parts.tenants.next_seq(model)
        if not 1 <= seq <= due + self._config.max_waiting:
            raise Refusal(
                f"seq_id={seq} while {due} is next", remedy="number the requests of a model from 1, without gaps"
            )
        if self._journal.outcome(model, seq) is None and self._parts.tenants.waiting(model) >= self._config.max_waiting:
            raise Refusal(f"{self._config.max_waiting} requests of {model} wait", remedy="ask again later", status=429)
        self._reserve_base(base, model, status=429)  # last, since a refused request must not reserve it
        self._parts.tenants.accept(JournalEntry(model=model, seq=seq, kind=kind, body=body, status=WAITING))
        return {"request_id": f"{model}:{seq}", "model_id": model}

    def _end_in_thread(self, entry: JournalEntry) -> None:
        """Handle the end of a request in the thread that computed it: pass saved weights to samplers, and notify the
        event loop."""
        if entry.kind == "save_weights_for_sampler":
            self._update_samplers(entry.model)
        self._loop.call_soon_threadsafe(self._notify_waiters, entry)

    def _notify_waiters(self, entry: JournalEntry) -> None:
        """Wake the calls that wait for the result of this request. If the request was a creation that failed, free the
        base that was reserved for the model."""
        event = self._result_events.pop((entry.model, entry.seq), None)
        if event is not None:
            event.set()
        if entry.seq == 0 and self._creation_failed(entry.model):
            self._release_base(entry.model)

    def _update_samplers(self, model: str) -> None:
        """Load the weights that a model saved last into its in-flight samplers."""
        rows = self._journal.all("SELECT * FROM samplers WHERE model = ? AND kind = 'inflight'", model)
        # skip samplers whose base is no longer served: their clients receive an error when they sample
        records = [record for record in map(SamplerRecord.from_row, rows) if record.base in self._bases]
        if not records or records[0].directory is None:
            return
        base = self._bases[records[0].base]
        loaded = set(base.weights.names())  # also samplers of a session without a recent heartbeat
        used = [record for record in records if record.session in self._heartbeats_s or record.id in loaded]
        if used:
            try:
                state = base.read_weights(Path(records[0].directory))
            except DataError:  # these weights have expired: their clients receive an error when they sample
                return
            for record in used:  # also a sampler that has not sampled yet: it may be reading the earlier weights
                base.weights.put(record.id, state.weights, state.version)

    # -- samples ----------------------------------------------------------------------------------------------------

    def create_sampling_session(self, body: bytes) -> dict[str, Any]:
        """Create a sampler of a base model or of a checkpoint's weights, and return its id. If the session already has
        a sampler with this number, return the id of that sampler."""
        request = schema.parse(body, schema.CreateSamplingSessionBody)
        self._record_session_use(request.session_id)
        sampler = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        base, directory, version, kind = request.base_model, None, 0, "base"
        with self._journal.transaction():  # so that no save replaces the checkpoint meanwhile
            if request.model_path is not None:
                row = self.catalog.checkpoint(request.model_path, "sampler_weights", "weights")
                directory, kind = row["directory"], "snapshot"
                facts = read_state_facts(Path(directory))
                base, version = facts["spec"]["base"], facts["version"]
            if base is None:
                raise Refusal("create_sampling_session has neither base_model nor model_path", remedy="give one")
            self._base(base)
            self._journal.run(
                "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, NULL, ?, ?)",
                sampler, request.session_id, base, request.model_path, kind, directory, version,
            )  # fmt: skip
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def get_sampler(self, sampler: str) -> dict[str, Any]:
        """Return the base and the checkpoint of a sampler. Raises :class:`Refusal` for an unknown id."""
        record = self._sampler(sampler)
        return {"sampler_id": sampler, "base_model": record.base, "model_path": record.path}

    def sample(self, body: bytes) -> dict[str, Any]:
        """Start a sampling task, and return the request id under which the client polls for the answers. A repeated
        request returns the id of the task that runs already. Raises :class:`Refusal` with status 429 if too many
        samples run."""
        request = schema.parse(body, schema.SampleBody)
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refusal("asample has no sampling_session_id or no seq_id", remedy="give both of them")
        record = self._sampler(request.sampling_session_id)
        self._record_session_use(record.session)
        name = f"{record.id}:{request.seq_id}"
        job = self._samples.get(name)
        if job is None or job.task.cancelled():
            self._refuse_excess(record, request.num_samples)
            ids = [f"{name}:{place}" for place in range(max(0, min(request.num_samples, 4096)))]
            task = self._group.create_task(self._sample_response(request, record, name))
            job = self._samples[name] = SampleJob(task=task, ids=ids, num_samples=request.num_samples, record=record)
        return {"request_id": name, "sample_sequence_ids": job.ids}

    def _refuse_excess(self, record: SamplerRecord, num_samples: int) -> None:
        """Raise :class:`Refusal` with status 429 if ``num_samples`` more samples would exceed ``max_samples``, or if
        too many samplers with whole weights of this base already sample."""
        jobs = [job for job in self._samples.values() if not job.task.done()]
        running = sum(job.num_samples for job in jobs)
        if running and running + num_samples > self._config.max_samples:
            raise Refusal(f"{running} samples run or wait", remedy="ask again later", status=429)
        base = self._base(record.base)
        if not base.training.compute.kind.alone or record.directory is None:
            return
        used = {job.record.id for job in jobs if job.record.directory and self._bases[job.record.base] is base}
        others = used - {record.id}
        if len(others) >= MOST_WHOLE_SAMPLERS:
            raise Refusal(f"{len(others)} other samplers of {record.base} sample", remedy="ask again later", status=429)

    async def _sample_response(self, request: schema.SampleBody, record: SamplerRecord, name: str) -> ResultResponse:
        """Run a sampling request, whose job is recorded under ``name``, and return the answer, or the error in the
        client's format. Errors are not raised: an error in one task of the group would cancel all other tasks."""
        try:
            found = await self._sample(request, record, name)
        except EngineFull as error:
            found = ResultResponse(body=describe_failure(error), status=410)  # the client sends the request again
        except Exception as error:  # noqa: BLE001 - the edge of a request: one client's must not end the others'
            found = ResultResponse(body=describe_failure(error))
        finally:
            self._samples.end(name, self._clock.now())
        self._samples.keep(name, found)
        return found

    async def _sample(self, request: schema.SampleBody, record: SamplerRecord, name: str) -> ResultResponse:
        """Sample, and return the encoded answers. The sampler's weights stay in memory until this coroutine ends."""
        base = self._base(record.base)
        plan, weights = make_sample_plan(request, base.limits, secrets.randbits(62)), base.weights
        adapter = "" if record.directory is None else record.id
        if adapter:
            await self._use(record)
        try:
            score, keep = partial(self._score, record), partial(self._store_samples, record, name, plan.prompt_N)
            return ResultResponse(body=await answer(plan, base.engine, adapter, score, keep), media=PROTOBUF)
        finally:
            if adapter:
                weights.release(adapter)

    async def _use(self, record: SamplerRecord) -> None:
        """Load the weights of the sampler ``record`` if needed, in a thread, and keep them in memory until they are
        released. If the caller is cancelled meanwhile, release them when the thread has finished."""
        weights = self._base(record.base).weights
        using = self._loop.run_in_executor(None, weights.use, record.id, lambda: self._read_sampler(record))

        def release(used: asyncio.Future[None]) -> None:
            """Release the weights that the thread has loaded for a cancelled caller."""
            if not used.cancelled() and used.exception() is None:
                weights.release(record.id)

        try:
            await asyncio.shield(using)
        except asyncio.CancelledError:
            using.add_done_callback(release)  # the thread cannot be cancelled
            raise

    def _store_samples(
        self, record: SamplerRecord, name: str, prompt_N: Array, sampled: Sequence[tuple[Tokens, StopReason]]
    ) -> None:
        """Write the sampled sequences and the version of each token to the journal, which ``headrace view`` shows."""
        now_s, prompt = self._clock.wall(), prompt_N.astype(np.int32).tobytes()
        self._journal.keep_samples(
            [
                (
                    f"{name}:{place}", record.id, now_s, prompt, tokens.ids_T.astype(np.int32).tobytes(),
                    tokens.logprobs_T.astype(np.float32).tobytes(), tokens.versions_T.astype(np.int32).tobytes(),
                    reason.value,
                )
                for place, (tokens, reason) in enumerate(sampled)
            ]
        )  # fmt: skip

    def _read_sampler(self, record: SamplerRecord) -> Any:
        """Read a sampler's weights from the disk, and return them with their version. If newer weights replace the
        files during the read, read the newer files."""
        base = self._base(record.base)
        while True:
            directory = self._sampler(record.id).directory
            assert directory is not None
            try:
                state = base.read_weights(Path(directory))
            except DataError:
                if self._sampler(record.id).directory == directory:
                    raise
                continue  # newer weights replaced this directory, which was deleted
            return state.weights, state.version

    async def _score(self, record: SamplerRecord, ids_N: Array, top: int, targets: Array | None) -> PromptScores:
        """Return the log-probabilities of the sequence ``ids_N`` under the weights of the sampler ``record``, computed
        by the thread that also trains. ``top`` is the number of likeliest tokens to return at each position, and
        ``targets`` are other tokens to score."""
        scored: asyncio.Future[PromptScores] = self._loop.create_future()
        base = self._base(record.base)
        weights = base.weights.find_weights(record.id)

        def set_result(found: PromptScores) -> None:
            """Resolve the caller's future, unless the caller was cancelled."""
            if not scored.done():
                scored.set_result(found)

        def job() -> Iterator[object]:
            """Compute the scores in one piece, in the computing thread."""
            found = base.training.compute.score(weights, ids_N, top=top, targets_NK=targets)
            self._loop.call_soon_threadsafe(set_result, found)
            yield None

        self._parts.turns.submit(record.session, job)  # all samplers of a client share one place in the round
        return await scored

    def cancel(self, body: bytes) -> dict[str, Any]:
        """Cancel a sampling request; do nothing if the request has ended or is unknown."""
        job = self._samples.get(schema.parse(body, schema.CancelBody).request_id)
        if job is not None:
            job.task.cancel()
        return {}

    # -- results ----------------------------------------------------------------------------------------------------

    async def retrieve(self, body: bytes) -> ResultResponse:
        """Wait up to ``poll_s`` seconds for the result of a request, and return it, or else status 408, after which the
        client polls again. Raises :class:`Refusal` for an unknown request, and for a result that was fetched long
        ago."""
        name = schema.parse(body, schema.RetrieveBody).request_id
        model, _, number = name.rpartition(":")
        if ":sample:" in name:
            return await self._retrieve_samples(name)
        if not is_number(number) or self._journal.outcome(model, int(number)) is None:
            raise Refusal(f"there is no request {excerpt(name)}", remedy="send it first", status=404)
        seq = int(number)
        event = self._result_events.setdefault((model, seq), asyncio.Event())
        found = self._journal.outcome(model, seq)  # read after the event was created, so that no result is missed
        if found is not None and found.status == WAITING:
            self._find_base(self.catalog.model(model))
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), self._config.poll_s)
            found = self._journal.outcome(model, seq)
        else:
            self._result_events.pop((model, seq), None)
        assert found is not None
        if found.status == WAITING:
            return _try_again()
        if found.result is None:
            raise Refusal(f"the result of {name} was fetched long ago", remedy="send a new request", status=410)
        now = self._clock.wall()
        self._journal.run(
            "UPDATE requests SET fetched_s = coalesce(fetched_s, ?) WHERE model = ? AND seq = ?", now, model, seq
        )
        row = self._journal.one("SELECT kind FROM requests WHERE model = ? AND seq = ?", model, seq)
        protobuf = found.status == DONE and row is not None and row["kind"] == "forward_backward"
        return ResultResponse(body=found.result, media=PROTOBUF if protobuf else JSON)

    async def _retrieve_samples(self, name: str) -> ResultResponse:
        """Return the answer to the sampling request ``name``, or status 408 if there is none within ``poll_s`` seconds.
        Raises :class:`Refusal` with status 410, after which the client sends the request again, if the server no longer
        has the request."""
        job = self._samples.get(name)
        gone = Refusal(
            f"the request {excerpt(name)} is not known any more", remedy="ask for the samples again", status=410
        )
        if job is None:
            raise gone
        waited = [job.task, self._ending]
        await asyncio.wait(waited, timeout=self._config.poll_s, return_when=asyncio.FIRST_COMPLETED)
        if not job.task.done():
            return _try_again()
        if job.task.cancelled():
            raise gone
        found, job.fetched = job.task.result(), True
        if found.status == 410:
            self._samples.forget(name)
            raise gone
        return found

    def end_waits(self) -> None:
        """Wake all requests that wait for a result, because the server ends. Their clients receive status 408 and poll
        again."""
        for event in self._result_events.values():
            event.set()
        self._ending.cancel()

    # -- descriptions and look-ups -----------------------------------------------------------------------------------

    def capabilities(self) -> dict[str, Any]:
        """Return the base models that the server offers, with the largest context of each in tokens."""
        facts = {"trainable": True, "sampleable": True}
        limits = {name: base.training.max_context for name, base in self._bases.items()}
        return {
            "supported_models": [
                {"model_name": name, "max_context_length": limit, **facts} for name, limit in limits.items()
            ]
        }

    def _sampler(self, sampler: str) -> SamplerRecord:
        """Return the record of the sampler with the id ``sampler``. Raises :class:`Refusal` for an unknown id."""
        row = self._journal.one("SELECT * FROM samplers WHERE id = ?", sampler)
        if row is None:
            raise Refusal(f"there is no sampler {excerpt(sampler)}", remedy="create it first", status=404)
        return SamplerRecord.from_row(row)

    def _find_base(self, model: Any) -> ServedBase:
        """Return the base of a model, given by its row of the journal. Raises :class:`Refusal` with status 503 if the
        base is not served now: the client then retries, and does not skip the request, for which later requests would
        wait."""
        name = json.loads(model["spec"])["base"]
        if name not in self._bases:
            raise Refusal(
                f"{model['id']} is of {name}, which is not served now",
                remedy=f"start the server with --name {name[:60]}=DIR",
                status=503,
            )
        return self._bases[name]

    def _base(self, name: str) -> ServedBase:
        """Return the base model with the name ``name``. Raises :class:`Refusal` if the server has no such base."""
        if name not in self._bases:
            known = ", ".join(self._bases)
            remedy = f"take {known}, or start the server with --name {name[:60]}=DIR"
            raise Refusal(f"there is no model {excerpt(name)}", remedy=remedy)
        return self._bases[name]


def is_number(text: str) -> bool:
    """Return whether a text is a whole number of at most 18 digits, which fits an integer column of the journal."""
    return text.isascii() and text.isdigit() and len(text) < 19


def _try_again() -> ResultResponse:
    """Return the response (status 408) after which the client polls again, because there is no result yet."""
    return ResultResponse(body=b'{"type": "try_again", "queue_state": "active"}', status=408)
