"""The execution of the requests of models: create, train, step, save and load. All of it runs in one thread, which
computes the requests of all models in turn, one piece at a time. A tenant is a model in training: its weights,
gradients and optimizer in memory.

Each request is computed by an iterator. It yields ``None`` after a piece of work, a tenant if it creates or replaces
the model's state, and at the end an :class:`Answer` with the result for the client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError, DataError, RunError
from headrace.models.text_part import prefixes_in_base
from headrace.models.weights import format_first, not_finite
from headrace.wings.tinker import wire
from headrace.wings.tinker.compute import FrozenBase, TrainResult
from headrace.wings.tinker.data import DataLimits, check_data
from headrace.wings.tinker.files import (
    WeightState,
    check_name,
    check_ttl,
    read_state,
    read_state_facts,
    write_model,
    write_state,
)
from headrace.wings.tinker.journal import Journal, JournalEntry
from headrace.wings.tinker.losses import choose_loss
from headrace.wings.tinker.schema import (
    CreateModelBody,
    LoadWeightsBody,
    OptimStepBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    parse,
)
from headrace.wings.tinker.tenant import Tenant
from headrace.wings.tinker.tenants import MISSING, MISSING_S, Answer, get_model_directory, make_answer
from headrace.wings.tinker.weights import WholeTensors

KINDS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""The part KIND of a checkpoint's path ``tinker://MODEL/KIND/NAME``, by the endpoint that saves it."""

Step = Iterator[Answer | Tenant | None]


def make_spec(body: CreateModelBody, base: FrozenBase) -> dict[str, Any]:
    """Return the settings (``spec``) of a new model on ``base``: base, rank, seed and trained parts. Raises
    :class:`~headrace.base.errors.ConfigError` if this server cannot train a model with the settings in ``body``."""
    if body.optimizer_config.type != "adamw":
        raise ConfigError(f"optimizer_config.type={body.optimizer_config.type!r}", remedy="set it to 'adamw'")
    return base.compute.kind.make_spec(body, base.max_rank)


class Performer:
    """The object that executes the requests of models. :class:`~headrace.wings.tinker.tenants.Tenants` calls it for
    each request in order, and again for requests that are repeated to restore a state. ``get_seed`` returns the seed
    for the initial weights of a model whose client sent none. ``ephemeral_s`` is the lifetime in seconds of weights
    that are saved for samplers without a name."""

    def __init__(
        self,
        journal: Journal,
        directory: Path,
        bases: Mapping[str, FrozenBase],
        *,
        clock: Clock,
        get_seed: Callable[[str], int],
        ephemeral_s: float,
    ) -> None:
        """Create a performer that reads and writes ``journal``, and stores files below the state ``directory``.
        ``bases`` are the base models by name; the class docstring explains the other parameters. ``clock`` gives the
        time from which lifetimes are counted."""
        self._journal, self._directory, self._bases = journal, directory, bases
        self._clock = clock
        self._seed_of, self._ephemeral_s = get_seed, ephemeral_s
        self._kinds = {
            "create_model": self._create,
            "forward_backward": self._train,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load,
            MISSING: self._missing,
        }
        """The method that computes each kind of request."""

    def __call__(self, tenant: Tenant | None, entry: JournalEntry) -> Step:
        """Return the iterator that computes the request ``entry``. ``tenant`` is the model's state in memory, or
        ``None`` if the model was not created. Raises :class:`~headrace.base.errors.DataError` for a request other than
        ``create_model`` and ``load_weights`` if the model was not created."""
        if tenant is None and entry.kind not in ("create_model", "load_weights"):
            raise DataError(f"the model {entry.model} was never created", remedy="look at the answer of create_model")
        return self._kinds[entry.kind](tenant, entry)

    def _create(self, _: Tenant | None, entry: JournalEntry) -> Step:
        """Create a new model with weights drawn from its seed. Its settings were checked when the request was accepted,
        and are read from the journal."""
        row = self._journal.one("SELECT spec FROM models WHERE id = ?", entry.model)
        assert row is not None, "requests of unknown models are refused"
        spec = json.loads(row["spec"])
        base = self._bases[spec["base"]]
        if spec["seed"] is None:
            spec["seed"] = self._seed_of(entry.model)
        yield Tenant(base.compute.kind.create(spec), spec)
        yield make_answer({"model_id": entry.model, "type": "create_model"})

    def _train(self, tenant: Tenant | None, entry: JournalEntry) -> Step:
        """Compute the loss of a request's data and, unless the request is forward only, add its gradient to the
        accumulated gradient of the model. Yield between micro-batches. The answer contains the log-probabilities of the
        targets and the loss. ``tenant`` is the model's state, and ``entry`` the request."""
        assert tenant is not None
        request = wire.read_train_request(entry.body)
        fn, options = choose_loss(request.loss_fn, request.loss_fn_config)
        base = self._bases[tenant.spec["base"]]
        limits = DataLimits(vocab_size=base.compute.vocab_size, max_context=base.max_context)
        check_data(request.data, fn.needed, fn.optional, limits)
        result = TrainResult()
        for _ in base.compute.train(
            tenant.weights, request.data, (fn, options), result, backward=not request.forward_only
        ):
            yield None
        yield Answer(result=wire.write_train_result(result.logprobs, {"loss:sum": result.loss}))

    def _step(self, tenant: Tenant | None, entry: JournalEntry) -> Step:
        """Make one optimizer step with the accumulated gradients and the AdamW settings of the request. Raises
        :class:`~headrace.base.errors.ConfigError` for settings that AdamW does not accept."""
        assert tenant is not None
        body = parse(entry.body, OptimStepBody)
        if body.adam_params is None:
            raise ConfigError("optim_step without adam_params", remedy="pass AdamParams: models here train with AdamW")
        settings = body.adam_params
        for name, value in msgspec.structs.asdict(settings).items():
            if not 0.0 <= value < (1.0 if name.startswith("beta") else float("inf")):
                raise ConfigError(f"adam_params.{name}={value}", remedy="give a number that torch's AdamW takes")
        yield make_answer({"metrics": tenant.step(settings), "type": "optim_step"})

    def _save(self, tenant: Tenant | None, entry: JournalEntry) -> Step:
        """Save the weights and the optimizer's state as a checkpoint from which training can continue."""
        assert tenant is not None
        body = parse(entry.body, SaveWeightsBody)
        name = f"{tenant.version:06d}" if body.path is None else body.path
        path, write = self._write_checkpoint(
            tenant, entry, name, body.ttl_seconds, metadata=body.user_metadata, overwrite=body.overwrite
        )
        yield make_answer({"path": path, "type": "save_weights"}, write=write)

    def _save_external(self, tenant: Tenant | None, entry: JournalEntry) -> Step:
        """Save the weights as files that other programs can load, for the client to download."""
        assert tenant is not None
        body = parse(entry.body, SaveExternalBody)
        if body.age_encryption_recipients:
            raise ConfigError("age_encryption_recipients: files are not encrypted here", remedy="leave it out")
        path, write = self._write_checkpoint(tenant, entry, body.path, body.ttl_seconds)
        yield make_answer({"path": path, "type": "save_weights_external"}, write=write)

    def _save_for_sampler(self, tenant: Tenant | None, entry: JournalEntry) -> Step:
        """Save weights to sample from: as a named checkpoint or, if the body has the number of a sampling session,
        without a name for that session. With the kind ``snapshot`` the weights of that session never change. With
        ``inflight`` all in-flight sessions of the model change to the new weights too. ``tenant`` is the model's state,
        and ``entry`` the request."""
        assert tenant is not None
        body = parse(entry.body, SaveForSamplerBody)
        if body.kind not in ("snapshot", "inflight"):
            raise ConfigError(f"kind={body.kind[:40]!r}", remedy="set it to 'snapshot' or 'inflight'")
        if body.sampling_session_seq_id is None:
            name = f"{tenant.version:06d}" if body.path is None else body.path
            path, write = self._write_checkpoint(tenant, entry, name, body.ttl_seconds, metadata=body.user_metadata)
            yield make_answer({"path": path, "type": "save_weights_for_sampler"}, write=write)
            return
        session = entry.model.partition(":")[0]
        sampler = f"{session}:sample:{body.sampling_session_seq_id}"
        place = f"ephemeral-{entry.seq}"
        directory = get_model_directory(self._directory, entry.model) / place
        size = write_state(directory, _finite_state(tenant), base=str(tenant.spec["base"]))
        version = tenant.version

        def note() -> None:
            """Record the new weights in the journal for the new sampling session and, with ``inflight``, for all
            in-flight sessions of the model. Saved weights that no session uses any more expire now."""
            now = self._clock.wall()
            values = (sampler, session, tenant.spec["base"], None, body.kind, entry.model, str(directory), version)
            self._journal.run("INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *values)
            if body.kind == "inflight":
                self._journal.run(
                    "UPDATE samplers SET directory = ?, version = ? WHERE model = ? AND kind = 'inflight'",
                    str(directory), version, entry.model,
                )  # fmt: skip
            self._journal.run(
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, 'ephemeral', ?, ?, ?, ?, '{}')",
                f"{entry.model}/{place}", entry.model, now, now + self._ephemeral_s, str(directory), size,
            )  # fmt: skip
            self._journal.expire_unused(now)  # the replaced weights are deleted soon

        yield make_answer({"sampling_session_id": sampler, "type": "save_weights_for_sampler"}, write=note)

    def _load(self, tenant: Tenant | None, entry: JournalEntry) -> Step:
        """Replace the weights of the model of the request ``entry`` by the weights of a training checkpoint with the
        same base, rank and parts. If the body's ``optimizer`` is true, load the state of the optimizer too. ``tenant``
        is the model's state, or ``None`` if the model is created by this request."""
        body = parse(entry.body, LoadWeightsBody)
        row = self._journal.one("SELECT * FROM checkpoints WHERE path = ? AND kind = 'weights'", body.path)
        if row is None or (row["expires_s"] or float("inf")) < self._clock.wall():
            raise DataError(
                f"there is no training checkpoint {body.path[:200]!r}", remedy="give a path that save_state returned"
            )
        directory = Path(row["directory"])
        spec = read_state_facts(directory)["spec"]
        base = self._find_base(spec)
        if body.base_model is not None and self._bases.get(body.base_model) is not base:
            raise DataError(
                f"base_model={body.base_model[:80]!r}: {body.path} is of {spec['base']}", remedy="leave base_model out"
            )
        if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
            raise ConfigError(f"optimizer_config.type={body.optimizer_config.type[:40]!r}", remedy="set it to 'adamw'")
        recorded = self._journal.one("SELECT spec FROM models WHERE id = ?", entry.model)
        assert recorded is not None, "requests of unknown models are refused"
        own = json.loads(recorded["spec"])  # the journal has the settings even if the model's state is lost
        if not self._fits(spec, own):
            raise DataError(
                f"{body.path} {_describe(spec)}; the model {_describe(own)}",
                remedy="create the model from the checkpoint: create_training_client_from_state",
            )
        compute = base.compute
        found = read_state(directory, compute.kind, compute.model.device, trained=True, moments=body.optimizer)
        loaded_spec = {**spec, "base": own["base"]}  # keep the name that the model's client uses for the base
        yield Tenant.restored(replace(found, spec=loaded_spec), gradients=False)
        answer = {"path": body.path, "model_id": entry.model, "type": "load_weights"}
        written = json.dumps(loaded_spec)

        def write() -> None:
            """Record the settings of the model with the loaded weights in the journal."""
            self._journal.run("UPDATE models SET spec = ? WHERE id = ?", written, entry.model)

        yield make_answer(answer, write=write, copy=True)

    def _missing(self, _: Tenant | None, entry: JournalEntry) -> Step:
        """Raise the error of a request that did not arrive or whose body was too long. The body of the journal entry
        has the reason and the remedy, one line each, or is empty if they are not known."""
        if entry.body:
            problem, remedy = entry.body.decode().split("\n", 1)
            raise DataError(problem, remedy=remedy)
        raise DataError(
            f"request {entry.seq} of {entry.model} has not arrived for {MISSING_S:.0f} s, and later ones waited for it",
            remedy="look at the error of the call that sent it, and repeat that call",
        )

    def _find_base(self, spec: Mapping[str, Any]) -> FrozenBase:
        """Return the base of a model with the settings ``spec``. Raises :class:`~headrace.base.errors.DataError` if it
        is not served."""
        base = self._bases.get(spec["base"])
        if base is None:
            raise DataError(f"the base {spec['base']} is not served", remedy="start the server with --name NAME=DIR")
        return base

    def _fits(self, loaded: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
        """Return whether weights that were saved with the settings ``loaded`` can be loaded into a model with the
        settings ``own``: the rank, the parts and the base must be the same."""
        same = all(loaded[key] == own[key] for key in ("rank", "parts"))
        return same and self._bases.get(loaded["base"]) is self._bases.get(own["base"])

    def _write_checkpoint(
        self,
        tenant: Tenant,
        entry: JournalEntry,
        name: str,
        ttl_s: int | None,
        *,
        metadata: Any = None,
        overwrite: bool = False,
    ) -> tuple[str, Callable[[], None]]:
        """Write the files of the checkpoint ``name`` of ``tenant`` for the request ``entry``. Return the checkpoint's
        path, and the function that writes its record to the journal together with the request's result. ``ttl_s`` is
        its time to live in seconds (``None``: for ever), and ``metadata`` is the client's metadata, which is stored
        unchanged. Raises :class:`~headrace.base.errors.DataError` if the path exists and ``overwrite`` is not set."""
        kind = KINDS[entry.kind]
        path = f"tinker://{entry.model}/{kind}/{check_name(name)}"
        check_ttl(ttl_s)
        old = self._journal.one("SELECT directory, size_bytes FROM checkpoints WHERE path = ?", path)
        if old is not None and not overwrite:
            raise DataError(f"{path} exists", remedy="take another name, or overwrite=True in save_state")
        directory = get_model_directory(self._directory, entry.model) / kind / f"{name}@{entry.seq}"
        state, external = _finite_state(tenant), kind == "external_weights"
        base = self._bases[tenant.spec["base"]]
        if external and isinstance(state.weights, WholeTensors):
            size = write_model(directory, state, base.compute.model, base.path)
        else:
            prefixes = prefixes_in_base(str(base.path), base.compute.model) if external else {}
            size = write_state(directory, state, base=str(tenant.spec["base"]), prefixes=prefixes)

        def write() -> None:
            """Record the checkpoint in the journal. The files of a checkpoint that it replaces are deleted soon if no
            sampler uses them."""
            now = self._clock.wall()
            expires = None if ttl_s is None else now + ttl_s
            facts = json.dumps({"user_metadata": metadata})
            self._journal.run(
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                path, entry.model, kind, now, expires, str(directory), size, facts,
            )  # fmt: skip
            if old is None or old["directory"] == str(directory):
                return
            self._journal.run(  # samplers of the replaced checkpoint keep its weights
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, 'ephemeral', ?, ?, ?, ?, '{}')",
                f"{entry.model}/replaced-{entry.seq}", entry.model, now, now + self._ephemeral_s, old["directory"],
                old["size_bytes"],
            )  # fmt: skip
            self._journal.expire_unused(now)

        return path, write


def _finite_state(tenant: Tenant) -> WeightState:
    """Return the weights and the optimizer's state of a model for a checkpoint or a sampler. Raises
    :class:`~headrace.base.errors.RunError` for weights that are infinite or not a number, which no later request could
    use."""
    state = tenant.state(gradients=False)
    if broken := not_finite(state.weights.tensors):
        raise RunError(
            f"the weights after {tenant.version} optimizer steps hold values that are infinite or not a number: "
            f"{format_first(broken)}; nothing is saved",
            remedy="load a checkpoint from before, and lower learning_rate",
        )
    return state


def _describe(spec: Mapping[str, Any]) -> str:
    """Return the rank, parts and base of a model as the predicate of a sentence, for error messages."""
    rank = "" if spec["rank"] is None else f"has rank {spec['rank']}, "
    return f"{rank}trains {', '.join(spec['parts']) or 'all weights'}, and is of the base {spec['base']}"
