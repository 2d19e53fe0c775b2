"""The preparation of a run or an evaluation: :func:`prepare` loads and checks everything before any process starts
(rows, prompts, the reward's file, devices, the context length), and :func:`make_order` makes the launch order from it.

A *row* is the data of one task, by column; a *task* is a row with its prompt as token ids. A *hub* model is named by
its repository on a model hub, and not by a directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.algo.losses.custom import Custom
from headrace.base.clock import RealClock
from headrace.base.config.user_code import find_in_file, refuse_missing_imports
from headrace.base.environ import is_part_of_a_run, num_cores
from headrace.base.errors import ConfigError, DataError, RequestError
from headrace.base.types.messages.codec import ENCODING_ERRORS, MessageCodec
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.control.config import RunSection
from headrace.control.observer import Observers
from headrace.engine.structure import Grammars
from headrace.launch.order import LaunchOrder, TeacherOrder
from headrace.learner.auxiliary.config import Frozen, OtherModel
from headrace.learner.disk import verify_model
from headrace.models import ModelConfig, load_tokenizer
from headrace.models.devices import Devices, choose_devices, num_gpus
from headrace.models.endings import stop_ids
from headrace.models.load import num_weight_bytes, refuse_other_vocabulary, refuse_settings, supported_config
from headrace.models.mixtures import routes
from headrace.models.settings import find_context_limit, model_directory, read_config
from headrace.rollout import Chat
from headrace.rollout.environments import Curriculum
from headrace.rollout.environments.bridges import find_bridge
from headrace.rollout.environments.data import Row, RowOrder, as_rows, load_rows
from headrace.rollout.environments.program import find_namespace_warnings, find_program, refuse_missing_script
from headrace.rollout.environments.prompts import make_tasks
from headrace.rollout.scoring.fit import refuse_missing_columns
from headrace.rollout.scoring.function import FunctionReward
from headrace.rollout.scoring.reward import reward_reference, split_reference
from headrace.run.rules import refuse
from headrace.run.rules.start import MACHINE, MODEL, ROWS, MachineFacts, ModelFacts, RowFacts
from headrace.run.session.config import RunConfig, make_recorded_settings, with_local_models
from headrace.run.session.engine_fit import refuse_unsupported
from headrace.run.session.own_engines import make_teacher_orders, refuse_misfits, resolve_frozen_agents
from headrace.sync.estimate import NUMBER_BYTES, refuse_short_deadline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Iterable[Mapping[str, Any]]
"""Rows that a caller passes in Python: a list of dicts, or a ``datasets`` object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The rows and the reward that a caller passes in Python in place of the run file's settings, and options of the
    checks."""

    data: Rows | None = None
    """The rows to train on; ``None``: the rows in ``data.path``."""
    eval_data: Rows | None = None
    """The held-out rows; ``None``: the rows in ``data.eval_path``."""
    reward: Callable[..., Any] | None = None
    """The reward, a function that is defined in a file; ``None``: the function that ``env.reward`` names."""
    thorough: bool = False
    """True if checks may take seconds, as in a dry run. The model's architecture is then checked, and the file of a
    reward may be imported, in a separate process, to find the parameters of a function whose source text does not show
    them. In a run the learner and the scoring workers make these checks when they start."""
    gpus: int | None = None
    """The number of GPUs to assume for this machine; ``None``: the number that torch finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The result of :func:`prepare`: everything that a run or an evaluation needs to start, loaded and checked."""

    config: RunConfig
    """The settings, with absolute paths of the user's files, and with local directories in place of hub models."""
    tasks: Sequence[Task]
    """The tasks to train on; empty for an evaluation."""
    eval_tasks: Sequence[Task]
    """The held-out tasks."""
    sampling: Sampling
    """The sampling parameters of training; the seed is replaced for every turn."""
    max_context: int
    """The maximum length of prompt and completion together, in tokens."""
    decode: Callable[[Sequence[int]], str]
    """The function from the token ids of a completion to the text that is scored."""
    chat: Chat
    """The chat template and parser of the model's messages."""
    devices: Devices
    """The devices of the engines and of the learner."""
    agents: Mapping[str, ModelConfig]
    """The models that the engines of agents with weights of their own load, by the agent's name."""
    teachers: Mapping[str, TeacherOrder]
    """The teachers that have engines of their own, by name."""

    isolation_warnings: Sequence[str] = ()
    """Warnings that the programs of episodes can read each other's data on this machine; empty if they cannot."""

    def fingerprint(self) -> str:
        """Return a hash, 16 hexadecimal digits, of the settings and rows that affect what is learned. A run that is
        resumed or replayed must have the same hash.

        The hash does not cover the settings of launch, display and devices, and in the section ``[run]`` only the seed,
        so that a resumed run may, for example, have more steps or run on other devices.
        """
        uncovered: dict[str, set[str] | bool] = {
            "launch": True,
            "engine": {"device", "cache_share", "count", "tensor", "pipeline", "server"},
            "learner": {"device"},
            "sync": {"options", "network_gb_s"},
        }
        run = RunSection.model_fields.keys() - {"seed"}
        settings = make_recorded_settings(self.config, exclude={"run": run, "observe": True, **uncovered})
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
        for task in self.tasks:
            digest.update(task.prompt_ids_T.tobytes())
            digest.update(_encode_request(task))  # all columns of the row, including the expected answer
        return digest.hexdigest()


def prepare(config: RunConfig, inputs: Inputs, *, training: bool = True, weights: bool = True) -> Prepared:
    """Load and check everything that a run with the settings ``config`` needs, and return it. ``inputs`` are the rows
    and the reward that replace those of the settings. No process of the run is started.

    If ``training`` is false, as for an evaluation, only the held-out rows are needed. If ``weights`` is false, as in a
    dry run, the weights of hub models are not downloaded.

    Raises :class:`~headrace.base.errors.ConfigError`, :class:`~headrace.base.errors.DataError`,
    :class:`~headrace.base.errors.ModelError` or :class:`~headrace.base.errors.EnvError`.
    """
    with_references = _with_absolute_entry(_with_reward(config, inputs))
    _refuse_missing_modules(with_references)
    config = with_local_models(with_references, weights=False)
    agents = resolve_frozen_agents(config)
    gpus = num_gpus() if inputs.gpus is None else inputs.gpus
    teachers = config.learner.served_teachers if training else {}
    devices = _choose_devices(config, gpus, num_others=len(agents) + len(teachers), training=training)
    refuse(MACHINE, config, MachineFacts(config=config, cores=num_cores(), devices=devices))
    refuse_unsupported(config, [*agents, *teachers], devices)
    verify_model(Path(config.model.path))
    if training and inputs.thorough:
        supported_config(config.model.path)
    elif training:  # the import of torch would take seconds; engine and learner make the remaining checks
        refuse_settings(config.model.path, read_config(config.model.path))
    if training:
        _check_own_loss(config)
        _refuse_missing_models(config)
        _refuse_ranks(config)
    rows, eval_rows = _load_needed_rows(config, inputs, training=training)
    tokenizer = load_tokenizer(config.model.path)
    mixture = routes(read_config(config.model.path))
    refuse(MODEL, config, ModelFacts(config=config, chat_template=tokenizer.chat_template, routes=mixture))
    column, own_prompts = config.data.prompt_column, config.env.remote
    tasks = make_tasks(rows, column, tokenizer, source=config.data.path or "data", optional=own_prompts)
    eval_source = config.data.eval_path or "eval_data"
    eval_tasks = make_tasks(eval_rows, column, tokenizer, source=eval_source, optional=own_prompts)
    _refuse_unsendable([*tasks, *eval_tasks])
    refuse_missing_columns(config.env.components, [*tasks, *eval_tasks], thorough=inputs.thorough)
    endings = stop_ids(config.model.path, tokenizer.eos_token_id)
    facts = _make_row_facts(config, tasks, eval_tasks)
    refuse(ROWS, config, facts)
    refuse_misfits(config, facts.context)
    if weights:  # last, since it may take long: all other errors have been reported by now
        with_local_models(with_references)
    if training and config.sync.deadline_s is not None:
        refuse_short_deadline(config.sync, _compute_version_bytes(config), RealClock())
    return Prepared(
        config=config,
        tasks=tasks,
        eval_tasks=eval_tasks,
        sampling=_make_sampling(config, tokenizer, endings),
        max_context=facts.context,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        chat=Chat.create(tokenizer, endings, config.env.tool_parser),
        devices=devices,
        agents=agents,
        teachers=make_teacher_orders(config, tasks, tokenizer, facts.context) if training else {},
        isolation_warnings=_find_isolation_warnings(config),
    )


def _make_row_facts(config: RunConfig, tasks: list[Task], eval_tasks: list[Task]) -> RowFacts:
    """Return the facts for the rules about rows (:data:`~headrace.run.rules.start.ROWS`): settings, tasks, and the
    context limit and vocabulary size of the model."""
    path = config.model.path
    vocab_size = read_config(path).vocab_size
    return RowFacts(
        config=config, tasks=tasks, eval_tasks=eval_tasks, limit=find_context_limit(path), vocab_size=vocab_size
    )


def _find_isolation_warnings(config: RunConfig) -> list[str]:
    """Return warnings if episodes run programs on this machine that can read each other's data; else an empty list."""
    env = config.env
    return find_namespace_warnings(own_namespace=env.own_namespace) if env.kind == "program" and env.workers else []


def _load_needed_rows(config: RunConfig, inputs: Inputs, *, training: bool) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on and the held-out rows, from ``inputs`` or from the files of the settings. Without
    both, the rows are numbers, as many as ``data.count`` and ``data.eval_count``. Without ``training`` there are no
    rows to train on.

    Raises :class:`~headrace.base.errors.ConfigError` if needed rows are missing.
    """
    count, eval_count = config.data.count or 0, config.data.eval_count or 0
    rows = _load_rows_or_numbers(config.data.path, inputs.data, "data.path", range(count)) if training else []
    held_out = range(count, count + eval_count)
    eval_rows = _load_rows_or_numbers(config.data.eval_path, inputs.eval_data, "data.eval_path", held_out)
    if training and not rows:
        raise ConfigError("data.path is not set: there is nothing to train on", remedy="set data.path, or give data=")
    if not training and not eval_rows:
        raise ConfigError("data.eval_path is not set: there is nothing to evaluate", remedy="set data.eval_path")
    return rows, eval_rows


def refuse_inside_a_run() -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if this process is itself part of a run, such as a scoring
    worker. ``train`` and ``evaluate`` make this check first.

    Without it, a script that contains the reward and starts the run would start another run in every process that
    imports the reward.
    """
    if is_part_of_a_run():
        raise ConfigError(
            "a run cannot be started by a process of a run: the file of the reward function starts one when imported",
            remedy='put its last part under: if __name__ == "__main__":',
        )


def _choose_devices(config: RunConfig, gpus: int, *, num_others: int, training: bool) -> Devices:
    """Return the devices of the engines and of the learner's ranks, as the settings and the machine determine them.
    ``gpus`` is the number of GPUs of this machine, and ``num_others`` the number of engines of agents and teachers;
    without ``training`` there is no learner."""
    num_engines, num_ranks = config.engine.count + num_others, config.learner.parallel.world if training else 0
    if config.launch.cluster is not None:
        return config.launch.cluster.devices(config.launch, num_engines, num_ranks)
    return choose_devices(
        config.engine.device,
        config.learner.device,
        ranks=num_ranks,
        gpus=gpus,
        count=num_engines,
        width=config.engine.width,
        only_cpu=config.model.deterministic,
    )


def _check_own_loss(config: RunConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if a custom loss, a function of the user, fails the contract
    suite of losses. Other losses are not checked."""
    if not isinstance(config.algo.loss, Custom):
        return
    from headrace.algo.check import check_loss

    report = check_loss(config.algo.loss)
    if not report.ok:
        raise ConfigError(f"algo.loss: {report}", remedy=f"fix it, then try headrace check loss {config.algo.loss.ref}")


def _refuse_missing_models(config: RunConfig) -> None:
    """Raise an error if the directory of another model or adapter that the learner reads (reference, teacher, critic,
    initial adapter) does not exist, or if its files differ from their checksums."""
    learner, lora = config.learner, config.model.lora
    paths = {
        f"learner.{name}.path": policy.path
        for name, policy in learner.policies.items()
        if isinstance(policy, Frozen | OtherModel)
    }
    paths |= {f"learner.teachers {name!r} path": each.path for name, (each, _) in learner.served_teachers.items()}
    paths |= {"learner.critic.path": learner.critic.path, "model.lora.adapter": None if lora is None else lora.adapter}
    for setting, path in paths.items():
        if path and not Path(path).is_dir():
            raise ConfigError(
                f"{setting}={path!r} is not a directory that can be read",
                remedy=f"give the directory of {'an adapter' if setting.startswith('model.lora') else 'a model'}",
            )
        if path:
            verify_model(Path(path))
    for name, policy in learner.policies.items():
        if isinstance(policy, OtherModel):
            refuse_other_vocabulary(policy.path, config.model.path, f"learner.{name}.path")


def _refuse_ranks(config: RunConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the model cannot be split over the ranks of
    ``learner.parallel``."""
    parallel, model = config.learner.parallel, config.model
    parallel.refuse_settings(model)
    if parallel.world > 1:
        parallel.refuse_model(model.path, read_config(model.path))


def _with_reward(config: RunConfig, inputs: Inputs) -> RunConfig:
    """Return ``config`` with an absolute path in ``env.reward``, the reference ``file.py:function`` of the reward. A
    reward in ``inputs`` replaces this setting. Raises :class:`~headrace.base.errors.ConfigError` if a needed reward is
    missing, and if both ``env.rewards`` and ``inputs`` have a reward."""
    env = config.env
    if env.rewards and inputs.reward is None:
        rewards = tuple(reward.check() for reward in env.rewards)
        return config.model_copy(update={"env": env.model_copy(update={"rewards": rewards})})
    if env.rewards:
        raise ConfigError("env.rewards is set, and a reward function is handed over too", remedy="give one of them")
    reference = env.reward if inputs.reward is None else reward_reference(inputs.reward)
    if not reference and env.remote:  # the environment may return the reward itself
        return config
    if not reference:
        raise ConfigError("env.reward is not set", remedy="set env.reward = 'file.py:function', or give reward=")
    path, name = split_reference(reference)
    return config.model_copy(update={"env": env.model_copy(update={"reward": f"{path.resolve()}:{name}"})})


def _with_absolute_entry(config: RunConfig) -> RunConfig:
    """Return ``config`` with an absolute path in ``env.entry``, the reference of the environment, after a check that
    its file exists. For a program or a bridge, only check that it exists. An empty ``env.entry`` is kept."""
    if config.env.kind == "program":
        find_program(config.env.argv)
    if config.env.kind == "bridge":
        find_bridge(config.env.entry)
        return config
    if not config.env.entry:
        return config
    path, name = find_in_file(config.env.entry, "env.entry")
    env = config.env.model_copy(update={"entry": f"{path.resolve()}:{name}"})
    return config.model_copy(update={"env": env})


def _refuse_missing_modules(config: RunConfig) -> None:
    """Raise :class:`~headrace.base.errors.HeadraceError` if a file of the user imports a module that this Python does
    not have, or the script of a program does not exist. Workers on other machines make these checks themselves."""
    env = config.env
    if config.launch.kind != "local":
        return
    for reward in env.components:
        if isinstance(reward, FunctionReward):
            setting = "env.reward" if reward.ref == env.reward else f"env.rewards {reward.label!r}"
            refuse_missing_imports(split_reference(reward.ref)[0], setting)
    if not env.workers:
        return
    if env.kind == "program":
        refuse_missing_script(env.argv)
    elif env.kind == "bridge":
        bridge, what = find_bridge(env.entry)
        if bridge.names_file:
            refuse_missing_imports(find_in_file(what, "env.entry")[0], "env.entry")
    elif env.entry:
        refuse_missing_imports(find_in_file(env.entry, "env.entry")[0], "env.entry")


def _load_rows_or_numbers(path: str, given: Rows | None, name: str, numbers: range) -> list[Row]:
    """Return the rows in ``given``, which a caller passed in Python, or the rows in the file ``path``. Without both,
    return one row ``{"number": n}`` for each of ``numbers``, for environments that generate their tasks. ``name`` is
    the setting of the path, for the error if rows are both set and passed."""
    if given is not None:
        if path or numbers:
            instead = f"{name}={path!r}" if path else name.replace("path", "count") + f"={len(numbers)}"
            raise ConfigError(f"{instead} is set, and rows are handed over too", remedy="give one of them")
        return as_rows(given)
    return load_rows(Path(path)) if path else [{"number": number} for number in numbers]


def _make_sampling(config: RunConfig, tokenizer: PreTrainedTokenizerBase, endings: tuple[int, ...]) -> Sampling:
    """Return the sampling parameters of training, from ``config``. ``tokenizer`` is the model's, for the check of a
    structure; ``endings`` are the token ids that end an answer.

    The parameters tell the engine what to record for each token: the kept-sets (the vocabulary entries that survived
    top-k, top-p, min-p or a structure) and the experts of a mixture, with which the learner recomputes logprobs, and
    entropies if they are used. Raises :class:`~headrace.base.errors.ConfigError` for a structure that this tokenizer
    cannot express.
    """
    engine = config.engine
    structure = "" if engine.structure is None else engine.structure.description
    if structure:
        try:
            Grammars(tokenizer, len(tokenizer), endings)(structure)
        except RequestError as error:
            raise ConfigError(f"engine.structure: {error.problem}", remedy=error.remedy) from None
    sampling = Sampling(
        max_new_tokens=engine.max_new_tokens,
        temperature=engine.temperature,
        top_k=engine.top_k,
        top_p=engine.top_p,
        min_p=engine.min_p,
        stop_ids=endings,
        structure=structure,
    )
    return msgspec.structs.replace(
        sampling,
        record_kept=sampling.truncated and config.learner.keep_sampling_mask,
        record_entropy=config.observe.record_entropy
        or "entropies" in config.algo.advantage.reads
        or (config.flow.pivots is not None and config.flow.pivots.choose == "entropy"),
        record_routing=config.learner.keep_routing and routes(read_config(config.model.path)),
    )


_CODEC = MessageCodec(ScoreCompletions)
"""The encoding of requests to the scoring workers."""


def _encode_request(task: Task) -> bytes:
    """Return the row and the prompt of a task, encoded as a request to a scoring worker without completions. The bytes
    are hashed, and decoded to check that the row can be sent."""
    return _CODEC.encode(ScoreCompletions(call=0, prompt=task.prompt, completions=(), row=task.row))


def _refuse_unsendable(tasks: Sequence[Task]) -> None:
    """Raise :class:`~headrace.base.errors.DataError` for a row that cannot be encoded for the scoring workers and
    decoded again. Without this check the run would end when the row is first scored."""
    for task in tasks:
        try:
            _CODEC.decode(_encode_request(task))
        except ENCODING_ERRORS as error:
            raise DataError(
                f"row {task.row_index + 1} cannot be handed to the reward function: {error}",
                remedy="use only text, numbers, lists and dicts in the rows",
            ) from None


def make_order(prepared: Prepared, *, run_dir: Path, snapshot: Path | None, observers: Observers) -> LaunchOrder:
    """Return the order for the launcher: the processes to start, with their settings and data from ``prepared``.
    ``run_dir`` is the directory of the run; ``snapshot`` is the directory of the weights and the optimizer state from
    which a resumed run continues, ``None`` for a new run; ``observers`` receive the spans and events of the
    processes."""
    config = prepared.config
    return LaunchOrder(
        model=config.model,
        snapshot=snapshot,
        engine=config.engine,
        learner=config.learner,
        algo=config.algo,
        env=config.env,
        agents=prepared.agents,
        teachers=prepared.teachers,
        sync=config.sync,
        columns=config.flow.columns,
        version_bytes=_compute_version_bytes(config),
        launch=config.launch,
        devices=prepared.devices,
        tasks=prepared.tasks,
        eval_tasks=prepared.eval_tasks,
        sampling=prepared.sampling,
        max_context=prepared.max_context,
        decode=prepared.decode,
        chat=prepared.chat,
        run_dir=run_dir,
        total_steps=config.run.steps,
        branch_weight=1.0 if config.flow.pivots is None else config.flow.pivots.weight,
        on_spans=observers.spans,
        on_event=observers.event,
        run_seed=config.run.seed,
        record_tokens=config.flow.record_tokens,
        stall_timeout_s=config.run.stall_timeout_s,
    )


def _compute_version_bytes(config: RunConfig) -> int:
    """Return the size in bytes of one version of the weights in the number format in which it is sent to the engines; 0
    if only adapters are trained, which are small."""
    if config.model.lora is not None:
        return 0
    bytes_per_number = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    sent = min(bytes_per_number, NUMBER_BYTES.get(config.sync.codec, bytes_per_number))
    return num_weight_bytes(model_directory(config.model.path), sent)


def make_row_order(config: RunConfig, num_rows: int) -> RowOrder:
    """Return the order of rows for a run without a curriculum: a function from the number of a group, from 0, to the
    index of its row among ``num_rows``, or to ``None`` after the last epoch. ``config`` has the seed and the number of
    epochs."""
    data = config.data
    return RowOrder(num_rows=num_rows, seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs)


def make_curriculum(config: RunConfig, num_rows: int) -> Curriculum | None:
    """Return the curriculum that ``data.curriculum`` configures, which chooses the row of each group; ``None`` if it is
    not set. ``num_rows`` is the number of rows to train on."""
    data = config.data
    if data.curriculum is None:
        return None
    return Curriculum(
        data.curriculum, num_rows=num_rows, seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs
    )
