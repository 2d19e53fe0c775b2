"""What is checked and loaded before any process starts: rows, prompts, the reward's file, the context."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.algo.losses.custom import Custom
from headrace.base.config.user_code import find_in_file
from headrace.base.environ import is_part_of_a_run, num_cores
from headrace.base.errors import ConfigError, DataError
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.launch.order import TeacherOrder
from headrace.learner.checksums import verify_model
from headrace.learner.companions.config import Frozen, OtherModel
from headrace.models import ModelConfig, context_length, load_tokenizer
from headrace.models.devices import CPU, Devices, num_gpus, settle
from headrace.models.endings import stop_ids
from headrace.models.load import limit_of, read_config
from headrace.models.mixtures import routes
from headrace.rollout import Chat
from headrace.rollout.environments.data import Row, as_rows, load_rows
from headrace.rollout.environments.program import find_program
from headrace.rollout.environments.prompts import make_tasks
from headrace.rollout.scoring.fit import refuse_lacking
from headrace.rollout.scoring.reward import reward_reference, split_reference
from headrace.run.session.agents import frozen_agents, refuse_misfits
from headrace.run.session.config import RunConfig
from headrace.run.session.engine_fit import refuse_settled
from headrace.run.session.models import as_recorded, with_local_models
from headrace.run.session.teachers import teacher_orders
from headrace.wings.bridges import find_bridge
from headrace.wings.cluster.ray.cluster import refuse_absent
from headrace.wings.cluster.ray.fit import devices_of

Rows = Iterable[Mapping[str, Any]]
"""Rows handed over in Python: a list of dicts, or a ``datasets`` object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a caller hands over in Python instead of naming it in the run file."""

    data: Rows | None = None
    """Rows to train on; ``None``: those of ``data.path``."""
    eval_data: Rows | None = None
    """Held-out rows; ``None``: those of ``data.eval_path``."""
    reward: Callable[..., Any] | None = None
    """A function that stands in a file; ``None``: that of ``env.reward``."""
    look: bool = False
    """Whether the file of a reward is imported, in a process of its own, where its text does not tell the parameters of
    the function: for a dry run. A scoring worker does so when it starts."""
    gpus: int | None = None
    """How many GPUs this machine is taken to have; ``None``: as many as torch sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that the launch needs, beside the configuration."""

    config: RunConfig
    """With the reward's reference filled in."""
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    sampling: Sampling
    """How training samples; its seed is replaced for every turn."""
    max_context: int
    """Prompt and completion together may be this long, in tokens."""
    decode: Callable[[Sequence[int]], str]
    """Ids of a completion to the text that is scored."""
    chat: Chat
    """Writes and reads the messages of the model."""
    devices: Devices
    """Where engine and learner compute."""
    agents: Mapping[str, ModelConfig]
    """What the engines of agents with weights of their own load, by name."""
    teachers: Mapping[str, TeacherOrder]
    """The teachers that have engines of their own, by name."""

    def fingerprint(self) -> str:
        """Names the settings and rows that decide what is learned: all but how long, where, and what is shown."""
        where: dict[str, set[str] | bool] = {
            "launch": True,
            "engine": {"device", "cache_share", "count", "server"},
            "learner": {"device"},
        }
        settings = as_recorded(self.config, exclude={"run": {"dir", "steps"}, "observe": True, **where})
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
        for task in self.tasks:
            digest.update(task.prompt_ids_T.tobytes())
            digest.update(_as_sent(task))  # the answers too
        return digest.hexdigest()


def prepare(config: RunConfig, inputs: Inputs, *, training: bool = True, weights: bool = True) -> Prepared:
    """Load and check it all. ``training=False``: only the held-out rows are needed. ``weights=False``: those of a model
    of a hub are not fetched.

    Raises :class:`~headrace.base.errors.ConfigError`, :class:`~headrace.base.errors.DataError`,
    :class:`~headrace.base.errors.ModelError` or :class:`~headrace.base.errors.EnvError`.
    """
    named = _with_entry(_with_reward(config, inputs))
    config = with_local_models(named, weights=False)
    _refuse_threads(config)
    agents = frozen_agents(config)
    gpus = num_gpus() if inputs.gpus is None else inputs.gpus
    teachers = config.learner.served_teachers if training else {}
    devices = _devices(config, gpus, num_others=len(agents) + len(teachers), training=training)
    refuse_settled(config, [*agents, *teachers], devices)
    _refuse_lending(config, devices)
    verify_model(Path(config.model.path))
    if training:
        _check_own_loss(config)
        _refuse_absent(config)
        _refuse_ranks(config)
    rows, eval_rows = _needed_rows(config, inputs, training=training)
    tokenizer = load_tokenizer(config.model.path)
    _refuse_mute(config, tokenizer.chat_template)
    column, own_words = config.data.prompt_column, config.env.remote
    tasks = make_tasks(rows, column, tokenizer, source=config.data.path or "data", optional=own_words)
    eval_source = config.data.eval_path or "eval_data"
    eval_tasks = make_tasks(eval_rows, column, tokenizer, source=eval_source, optional=own_words)
    _refuse_unsendable([*tasks, *eval_tasks])
    refuse_lacking(config.env.components, [*tasks, *eval_tasks], look=inputs.look)
    if training:
        _refuse_too_few_rows(config, len(tasks))
    endings = stop_ids(config.model.path, tokenizer.eos_token_id)
    context = _context(config, tasks, eval_tasks)
    refuse_misfits(config, context)
    if training:
        _refuse_small_passes(config, tasks, context)
    if weights:  # last, as it may take long: what is wrong with the rest has been said
        with_local_models(named)
    return Prepared(
        config=config,
        tasks=tasks,
        eval_tasks=eval_tasks,
        sampling=_sampling(config, endings),
        max_context=context,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        chat=Chat.of(tokenizer, endings, config.env.tool_parser),
        devices=devices,
        agents=agents,
        teachers=teacher_orders(config, tasks, tokenizer, context) if training else {},
    )


def _needed_rows(config: RunConfig, inputs: Inputs, *, training: bool) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on and the held-out ones; :class:`~headrace.base.errors.ConfigError` where those that
    are
    needed are not set."""
    count, eval_count = config.data.count or 0, config.data.eval_count or 0
    rows = _rows(config.data.path, inputs.data, "data.path", range(count)) if training else []
    held_out = range(count, count + eval_count)
    eval_rows = _rows(config.data.eval_path, inputs.eval_data, "data.eval_path", held_out)
    if training and not rows:
        raise ConfigError("data.path is not set: there is nothing to train on", remedy="set data.path, or give data=")
    if not training and not eval_rows:
        raise ConfigError("data.eval_path is not set: there is nothing to evaluate", remedy="set data.eval_path")
    return rows, eval_rows


def refuse_inside_a_run() -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` in a process of a run: a script that is imported for its reward
    would
    start itself without end."""
    if is_part_of_a_run():
        raise ConfigError(
            "a run cannot be started by a process of a run: the file of the reward function starts one when imported",
            remedy='put its last part under: if __name__ == "__main__":',
        )


def _refuse_mute(config: RunConfig, chat_template: str | None) -> None:
    if config.env.kind in ("env", "program", "bridge") and chat_template is None:
        raise ConfigError(
            f"env.kind={config.env.kind!r} speaks in messages, and the tokenizer of model.path={config.model.path!r} "
            "has no chat template",
            remedy="use a chat model, or add a chat_template.jinja to the model directory",
        )


def _refuse_threads(config: RunConfig) -> None:
    cores = num_cores()
    for name in ("engine_threads", "learner_threads"):
        asked = config.launch.model_dump()[name]
        if asked is not None and asked > cores:
            raise ConfigError(
                f"launch.{name}={asked}, and this machine has {cores} cores", remedy=f"set launch.{name} <= {cores}"
            )


def _refuse_lending(config: RunConfig, devices: Devices) -> None:
    if not config.launch.lend_cores:
        return
    places = sorted({*devices.engines, *devices.learner} - {CPU})
    reasons = {
        f"the engine or the learner computes on {', '.join(places)}": places,
        f"engine.kind={config.engine.kind!r} keeps the cores that it was started with": config.engine.kind != "native",
        "model.deterministic=true promises the same bits whatever the other parts do": config.model.deterministic,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"launch.lend_cores=true, and {reason}", remedy="leave launch.lend_cores out")


def _devices(config: RunConfig, gpus: int, *, num_others: int, training: bool) -> Devices:
    """``num_others``: engines of agents and teachers."""
    if config.launch.remote:
        refuse_absent()
        num_ranks = config.learner.parallel.world if training else 0
        return devices_of(config.launch, config.engine.count + num_others, num_ranks)
    return settle(
        config.engine.device,
        config.learner.device,
        ranks=config.learner.parallel.world if training else 0,
        gpus=gpus,
        count=config.engine.count + num_others,
        only_cpu=config.model.deterministic,
    )


def _check_own_loss(config: RunConfig) -> None:
    """A loss of the user's own must keep the contract that every loss keeps."""
    if not isinstance(config.algo.loss, Custom):
        return
    from headrace.algo.check import check_loss

    report = check_loss(config.algo.loss)
    if not report.ok:
        raise ConfigError(
            f"algo.loss: {report}",
            remedy=f"mend it, then try headrace check loss {config.algo.loss.ref}",
        )


def _refuse_absent(config: RunConfig) -> None:
    """A directory that the learner is to read must be there, and be what was written where it is a snapshot's."""
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


def _refuse_ranks(config: RunConfig) -> None:
    parallel, model = config.learner.parallel, config.model
    parallel.refuse_settings(model)
    if parallel.world > 1:
        parallel.refuse_model(model.path, read_config(model.path))


def _refuse_small_passes(config: RunConfig, tasks: Sequence[Task], context: int) -> None:
    """A sample is trained in one pass: one that cannot be would end the run at its first long answer."""
    budget, longest = config.learner.tokens_per_microbatch, max(len(task.prompt_ids_T) for task in tasks)
    needed = min(context, longest + config.engine.max_new_tokens)
    if needed > budget:
        raise ConfigError(
            f"learner.tokens_per_microbatch={budget}, and a sample may have {needed} tokens: a prompt of {longest} and "
            f"engine.max_new_tokens={config.engine.max_new_tokens}",
            remedy=f"set learner.tokens_per_microbatch >= {needed}, or lower engine.max_new_tokens",
        )


def _refuse_too_few_rows(config: RunConfig, num_rows: int) -> None:
    epochs, batch = config.data.epochs, config.flow.groups_per_step
    if epochs is not None and epochs * num_rows < batch:
        raise ConfigError(
            f"data.epochs={epochs} over {num_rows} rows makes {epochs * num_rows} groups, fewer than one batch "
            f"(flow.groups_per_step={batch}): no step could ever start",
            remedy=f"set data.epochs >= {-(-batch // num_rows)}, lower flow.groups_per_step, or give more rows",
        )


def _with_reward(config: RunConfig, inputs: Inputs) -> RunConfig:
    env = config.env
    if env.rewards and inputs.reward is None:
        rewards = tuple(reward.check() for reward in env.rewards)
        return config.model_copy(update={"env": env.model_copy(update={"rewards": rewards})})
    if env.rewards:
        raise ConfigError("env.rewards is set, and a reward function is handed over too", remedy="give one of them")
    reference = env.reward if inputs.reward is None else reward_reference(inputs.reward)
    if not reference and env.remote:  # the environment says what an episode earned
        return config
    if not reference:
        raise ConfigError("env.reward is not set", remedy="set env.reward = 'file.py:function', or give reward=")
    path, name = split_reference(reference)
    return config.model_copy(update={"env": env.model_copy(update={"reward": f"{path.resolve()}:{name}"})})


def _with_entry(config: RunConfig) -> RunConfig:
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


def _rows(path: str, given: Rows | None, name: str, numbers: range) -> list[Row]:
    if given is not None:
        if path or numbers:
            instead = f"{name}={path!r}" if path else name.replace("path", "count") + f"={len(numbers)}"
            raise ConfigError(f"{instead} is set, and rows are handed over too", remedy="give one of them")
        return as_rows(given)
    return load_rows(Path(path)) if path else [{"number": number} for number in numbers]


def _context(config: RunConfig, tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> int:
    """How long prompt and completion together may be; refuses what no task could fit."""
    limit = limit_of(config.model.path)
    possible, why = limit.length, f": {limit.reason}" if limit.reason else ""
    asked = config.engine.max_context
    if asked is not None and asked > possible:
        raise ConfigError(
            f"engine.max_context={asked} is more than the model's context of {possible}{why}",
            remedy=f"set engine.max_context <= {possible}",
        )
    new = config.engine.max_new_tokens
    longest = max(len(task.prompt_ids_T) for task in [*tasks, *eval_tasks])
    shortest = min(len(task.prompt_ids_T) for task in tasks or eval_tasks)
    usual = possible if config.env.remote else min(possible, longest + new)
    context = asked if asked is not None else usual
    if shortest + new > context:
        raise ConfigError(
            f"no prompt fits: the shortest has {shortest} tokens, with engine.max_new_tokens={new} more than the "
            f"context of {context}{why if context == possible else ''}",
            remedy="lower engine.max_new_tokens, shorten the prompts, or use a model with a longer context",
        )
    _refuse_short_critic(config, context)
    return context


def _refuse_short_critic(config: RunConfig, context: int) -> None:
    path = config.learner.critic.path
    if path and context_length(path) < context:
        raise ConfigError(
            f"learner.critic.path={path!r} was made for {context_length(path)} tokens, and samples may have {context}",
            remedy=f"choose a critic for >= {context} tokens, or set engine.max_context <= {context_length(path)}",
        )


def _sampling(config: RunConfig, endings: tuple[int, ...]) -> Sampling:
    """What an exact loss needs is recorded: what could be drawn, if not everything; experts, if there are any."""
    engine = config.engine
    sampling = Sampling(
        max_new_tokens=engine.max_new_tokens,
        temperature=engine.temperature,
        top_k=engine.top_k,
        top_p=engine.top_p,
        min_p=engine.min_p,
        stop_ids=endings,
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


def _as_sent(task: Task) -> bytes:
    return _CODEC.encode(ScoreCompletions(call=0, prompt=task.prompt, completions=(), row=task.row))


def _refuse_unsendable(tasks: Sequence[Task]) -> None:
    """Rows travel to the scoring workers: better to know now than in the middle of a run."""
    for task in tasks:
        try:
            _CODEC.decode(_as_sent(task))
        except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"row {task.row_index + 1} cannot be handed to the reward function: {error}",
                remedy="keep text, numbers, lists and dicts in the rows",
            ) from None
