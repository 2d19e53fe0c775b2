"""The preparation of a run on given rows: it loads and checks the rows, their order, the loss and the run's length.

A *place* is a position in the order of training, counted from 0. A row that is trained in two epochs has two places.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.algo.base import Loss
from headrace.algo.losses.preference import Kto, Orpo
from headrace.algo.losses.supervised import Ce
from headrace.algo.objective import Objective
from headrace.algo.reductions import PromptMean, SequenceMeanTokenMean, TokenMean
from headrace.base.config import validate
from headrace.base.environ import num_cores, rank_place
from headrace.base.errors import ConfigError, DataError
from headrace.learner.auxiliary.config import FrozenTeacher, OwnEngine
from headrace.learner.config import LearnerConfig
from headrace.learner.disk import verify_model
from headrace.learner.parallel.load import refuse_libraries
from headrace.models import load_tokenizer
from headrace.models.devices import choose_devices, num_gpus
from headrace.models.endings import stop_ids
from headrace.models.hub import change_models, local_directory, pinned_path
from headrace.models.settings import find_context_limit, read_config
from headrace.run.observe.words import plural
from headrace.wings.supervised.config import DistillConfig, DpoConfig, TuningConfig
from headrace.wings.supervised.measuring import check_measuring
from headrace.wings.supervised.order import RowStream
from headrace.wings.supervised.reading import Render, RowLimits, RowSet, read_rows
from headrace.wings.supervised.rendering import RowRenderer
from headrace.wings.supervised.teaching import check_teacher

Rows = Iterable[Mapping[str, Any]]
"""Rows that a caller passes in Python: a list of dicts, or a ``datasets`` object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSchedule:
    """The schedule of a run: the rows of each step."""

    stream: RowStream
    """The endless sequence of rows, by place."""
    num_places: int
    """The number of places of the run: a row counts once for each time it is trained."""
    rows_per_step: int
    """The number of rows of each step; the last step may have fewer."""

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps of the whole run; the last may have fewer rows."""
        return -(-self.num_places // self.rows_per_step)

    def places(self, step: int) -> range:
        """Return the places of step ``step``, counted from 0."""
        first = step * self.rows_per_step
        return range(first, min(first + self.rows_per_step, self.num_places))

    def rows(self, step: int) -> Sequence[int]:
        """Return the rows of step ``step``, as indices into the rows of all sources."""
        places = self.places(step)
        found: list[int] = self.stream.rows(places.start, places.stop).tolist()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTuning:
    """A run on given rows, loaded and checked by :func:`prepare_tuning`, and ready to start."""

    config: TuningConfig
    """The settings; a model's name on a hub is replaced by its local directory."""
    verb: str
    """``sft``, ``dpo`` or ``distill``."""
    objective: Objective
    """The loss, and its averaging over the tokens or rows of a step."""
    rows: RowSet
    """The rows to train on, rendered as tokens."""
    eval_rows: RowSet | None
    """The held-out rows, rendered as tokens; ``None`` if there are none."""
    schedule: RowSchedule
    note: str
    """A note about columns that are not read; empty if there is none."""

    @property
    def samples_per_row(self) -> int:
        """Return the number of samples of a row: two for a pair of answers, otherwise one."""
        return 2 if "pairs" in self.objective.columns else 1

    def recorded(self) -> dict[str, Any]:
        """Return the settings as they are stored in ``config.json``; models of a hub have their name and commit instead
        of a local directory."""
        tree = self.config.model_dump(mode="json")
        return {"verb": self.verb, **change_models(tree, lambda _, path: pinned_path(path))}

    def fingerprint(self) -> str:
        """Return two hashes, separated by a colon: of the rows and their order, which must not change when the run is
        resumed, and of the other settings that affect training, whose change is only reported."""
        run = self.config.run
        order: list[Any] = [run.seed, run.rows_per_step, self.config.data.shuffle]
        order += [(len(source.rows), source.weight) for source in self.rows.sources]
        settings = self.recorded()
        other = {key: settings[key] for key in ("model", "learner", "loss", "teacher") if settings.get(key)}
        return f"{self.rows.fingerprint()}{settings_hash(order)}:{settings_hash(other)}"


def settings_hash(tree: Any) -> str:
    """Return a hash of a tree of plain values, as hexadecimal digits."""
    return hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=8).hexdigest()


def prepare_tuning(
    config: TuningConfig, *, data: Rows | None = None, eval_data: Rows | None = None, weights: bool = True
) -> PreparedTuning:
    """Load and check everything that a run needs. ``data`` and ``eval_data`` are rows that replace the files in
    ``config``. With ``weights=False``, the weights of a model on a hub are not downloaded, which is enough to describe
    the run.

    Raises :class:`~headrace.base.errors.ConfigError`, :class:`~headrace.base.errors.DataError` and
    :class:`~headrace.base.errors.ModelError`.
    """
    tree = config.model_dump(mode="json")
    found = change_models(tree, lambda setting, path: local_directory(path, setting, weights=weights))
    if found != tree:
        config = validate(type(config), found)
    path = config.model.path
    config.learner.optimizer.refuse_missing()
    _refuse_ranks(config)
    verify_model(Path(path))
    if not config.data.files and data is None:
        raise ConfigError("data.path is missing: there are no rows to train on", remedy="set data.path")
    objective = make_objective(config)
    tokenizer = load_tokenizer(path)
    endings = stop_ids(path, tokenizer.eos_token_id)
    renderer = RowRenderer(
        tokenizer, endings, config.data.loss_on, prompt_loss=isinstance(objective.loss, Orpo)
    )  # fmt: skip
    render = _render_method(renderer, objective, config)
    limits = _row_limits(config, path)
    rows = read_rows(
        [(file.path, file.weight) for file in config.data.files], data, config.data, render, limits=limits
    )  # fmt: skip
    if isinstance(objective.loss, Kto):
        _refuse_kto_without_pairs(config, rows, limits)
    _refuse_unequal_scores(rows)
    if isinstance(config, DistillConfig):
        check_teacher(config, tokenizer, rows)
    if config.eval:
        check_measuring(config.eval, path)
    return PreparedTuning(
        config=config,
        verb=config.verb,
        objective=objective,
        rows=rows,
        eval_rows=_read_eval_rows(config, eval_data, render, limits),
        schedule=_schedule(config, rows),
        note=renderer.unread,
    )


def _refuse_ranks(config: TuningConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a learner on several ranks if the model cannot be divided
    among them, the installed libraries cannot compute it, or a launcher such as torchrun started this process."""
    parallel, path = config.learner.parallel, config.model.path
    parallel.refuse_settings(config.model)
    if (world := rank_place().world) > 1:
        raise ConfigError(
            f"a launcher (torchrun, for example) has started {world} processes of headrace {config.verb}, which starts "
            "its ranks itself",
            remedy=f"call headrace {config.verb} once, and set learner.parallel.data = {world}",
        )
    if parallel.world > 1:
        refuse_libraries()
        parallel.refuse_model(path, read_config(path))
        choose_devices("cpu", config.learner.device, ranks=parallel.world, gpus=num_gpus())


def _render_method(renderer: RowRenderer, objective: Objective, config: TuningConfig) -> Render:
    """Return the method of ``renderer`` that renders rows for the loss of the run: with a teacher's scores, as a pair,
    as a labelled answer (KTO), or as a sample to imitate."""
    if isinstance(config, DistillConfig) and not config.learner.teachers and config.teacher is None:
        return renderer.distilled
    if "pairs" in objective.columns:
        return renderer.pair
    return renderer.labelled if isinstance(objective.loss, Kto) else renderer.supervised


def _refuse_kto_without_pairs(config: TuningConfig, rows: RowSet, limits: RowLimits) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if KTO's divergence cannot be estimated. The estimate combines
    each answer with the prompt of another row of the step. So each step needs several rows, and the longest prompt with
    the longest answer must fit into the context. ``limits`` are the limits of length for every row."""
    per_step, num_places = config.run.rows_per_step, _num_places(config, rows)
    if per_step == 1 or num_places % per_step == 1:
        raise ConfigError(
            f"loss='kto' with run.rows_per_step={per_step}: a step would have one row of {num_places}, and no answer "
            "to another prompt to estimate the divergence with",
            remedy="set another run.rows_per_step, or run.steps",
        )
    samples = [row[0] for row in rows.rows]
    if len({one.ids_T[: one.num_prompt].tobytes() for one in samples}) == 1:
        raise ConfigError(
            "loss='kto': all rows have one prompt, and there is no answer to another prompt to estimate the divergence "
            "with",
            remedy="give rows with several prompts, or choose loss = 'dpo' with pairs",
        )
    longest = max(one.num_prompt for one in samples) + max(len(one.ids_T) - one.num_prompt for one in samples)
    if longest > min(limits.length, limits.row_length):
        raise ConfigError(
            f"loss='kto' reads answers after other prompts: the longest of both have {longest} tokens, more than "
            f"{limits.length_origin}",
            remedy="set data.max_length lower with data.long_rows = 'skip', or raise that limit",
        )


def _refuse_unequal_scores(rows: RowSet) -> None:
    """Raise :class:`~headrace.base.errors.DataError` if rows contain different numbers of a teacher's entries per
    token, because the loss would differ from row to row."""
    sizes = [0 if row[0].teacher_scores is None else row[0].teacher_scores.ids_TK.shape[1] for row in rows.rows]
    other = next((place for place, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        raise DataError(
            f"{rows.place(other)} has {sizes[other]} entries of the teacher for each token, and {rows.place(0)} has "
            f"{sizes[0]}",
            remedy="give as many for every token of every row",
        )


def _read_eval_rows(
    config: TuningConfig,
    data: Rows | None,
    render: Render,
    limits: RowLimits,
) -> RowSet | None:
    """Return the held-out rows, from ``data`` or else from ``data.eval_path``; ``None`` if there are none. Raises
    :class:`~headrace.base.errors.ConfigError` if evaluations are configured and there is nothing to evaluate."""
    if data is None and not config.data.eval_path:
        if config.run.eval_every and not config.eval:
            raise ConfigError(
                f"run.eval_every={config.run.eval_every} has no effect without held-out rows",
                remedy="set data.eval_path, or a table [eval] for rewards, or leave run.eval_every out",
            )
        return None
    return read_rows([(config.data.eval_path, None)], data, config.data, render, limits=limits)


def make_objective(config: TuningConfig) -> Objective:
    """Return the objective of a run: the mean over tokens of the cross-entropy or of the divergence from a teacher, the
    mean over pairs of a preference loss, or the mean over rows of KTO's. ``config`` are the settings of the run."""
    if isinstance(config, DistillConfig):
        return Objective(config.loss, (), TokenMean())
    if isinstance(config, DpoConfig):
        loss: Loss = config.loss
        return Objective(loss, (), SequenceMeanTokenMean() if isinstance(loss, Kto) else PromptMean())
    return Objective(Ce(), (), TokenMean())


def learner_settings(config: TuningConfig, objective: Objective) -> LearnerConfig:
    """Return the learner's settings for ``objective``. If the rows contain a teacher's scores, add a teacher that is
    computed elsewhere, so that the learner uses the recorded scores. ``config`` are the settings of the run."""
    learner = config.learner
    if "top_k" in objective.columns and not learner.teachers:
        return learner.model_copy(update={"teachers": (FrozenTeacher(engine=OwnEngine()),)})
    return learner


def _row_limits(config: TuningConfig, path: str) -> RowLimits:
    """Return the limits of length and vocabulary for every row, from the settings, the learner and the model in
    ``path``. Raises :class:`~headrace.base.errors.ConfigError` if ``data.max_length`` exceeds the limit of learner or
    model."""
    budget, context = config.learner.tokens_per_microbatch, find_context_limit(path).length
    length, why = min(
        (budget, f"learner.tokens_per_microbatch={budget}"), (context, f"the context of the model, {context}")
    )
    max_length = config.data.max_length
    if max_length is not None and max_length > length:
        raise ConfigError(
            f"data.max_length={max_length} is more than {why}", remedy=f"set data.max_length <= {length}"
        )  # fmt: skip
    if max_length is not None:
        length, why = max_length, f"data.max_length={max_length}"
    vocab_size = int(read_config(path).get_text_config().vocab_size)
    return RowLimits(length=length, row_length=budget, length_origin=why, vocab_size=vocab_size)


def _schedule(config: TuningConfig, rows: RowSet) -> RowSchedule:
    """Return the schedule of the run: the rows of each step."""
    run = config.run
    weights = [source.weight for source in rows.sources if source.weight is not None]
    stream = RowStream(
        [len(source.rows) for source in rows.sources], weights or None, seed=run.seed, shuffle=config.data.shuffle
    )
    return RowSchedule(stream=stream, num_places=_num_places(config, rows), rows_per_step=run.rows_per_step)


def _num_places(config: TuningConfig, rows: RowSet) -> int:
    """Return the number of places of the run, from ``run.steps`` or ``run.epochs``."""
    run = config.run
    return len(rows.rows) * run.epochs if run.steps is None else run.steps * run.rows_per_step


def explain_tuning(prepared: PreparedTuning) -> str:
    """Return the description of the run ``prepared`` for ``--dry-run``, as lines of text: its rows, its length, its
    loss and its evaluations."""
    config, schedule = prepared.config, prepared.schedule
    learner: LearnerConfig = config.learner.serving(prepared.objective.columns)
    samples = [sample for row in prepared.rows.rows for sample in row]
    tokens = sum(len(sample.ids_T) for sample in samples)
    trained = sum(int(sample.mask_T.sum()) for sample in samples)
    epochs = schedule.num_places / len(prepared.rows.rows)
    unit = "pair" if prepared.samples_per_row == 2 else "row"
    lines = [
        f"{plural(len(prepared.rows.rows), unit)} of {plural(tokens, 'token')}, {trained:,} of which carry loss; "
        f"the longest has {max(len(sample.ids_T) for sample in samples):,}.",
        f"{plural(schedule.num_steps, 'step')} of {plural(schedule.rows_per_step, unit)}: "
        f"{plural(float(f'{epochs:.3g}'), 'epoch')}"
        + (
            f"; the last step has {len(schedule.places(schedule.num_steps - 1))}."
            if schedule.num_places % schedule.rows_per_step
            else "."
        ),
        f"Loss: {loss_name(prepared)}, learning rate {learner.lr:g} ({learner.schedule}).",
    ]
    if (world := learner.parallel.world) > 1:
        lines.append(
            f"The learner runs as {world} ranks (processes) on this machine, which has "
            f"{plural(num_cores(), 'processor core')}."
        )
    if learner.reference is not None and prepared.samples_per_row == 2:
        lines.append(f"The reference model is {learner.reference}.")
    when = f"every {config.run.eval_every} steps" if config.run.eval_every else "before and after training"
    if prepared.eval_rows is not None:
        lines.append(f"{plural(len(prepared.eval_rows.rows), unit)} held out, measured {when}.")
    if config.eval:
        lines.append(f"Rewards and pass@k by [eval], measured {when}, beside training.")
    for name, found in (("", prepared.rows), ("of the held-out rows ", prepared.eval_rows)):
        if found is not None and found.words():
            lines.append(f"Note: {name}{found.words()}.")
    lines += [f"Note: of the rows, {prepared.note}."] if prepared.note else []
    weighted = [source for source in prepared.rows.sources if source.weight is not None]
    total = sum(source.weight or 0.0 for source in weighted)
    lines += [
        f"Source {source.name}: {plural(len(source.rows), unit)}, {(source.weight or 0.0) / total:.1%} of the places."
        for source in weighted
    ]
    return "\n".join(lines)


def loss_name(prepared: PreparedTuning) -> str:
    """Return the name of the loss of the run ``prepared`` for people; for distillation it includes the teacher."""
    config = prepared.config
    if isinstance(config, DistillConfig):
        models: list[object] = [*config.learner.teachers]
        if config.teacher is not None:
            models.append(f"the model {config.teacher.model} at {config.teacher.base_url}".replace("  ", " "))
        teacher = models[0] if models else "what the rows say of it"
        return f"{config.loss.divergence} divergence from a teacher ({teacher})"
    return config.loss.kind if isinstance(config, DpoConfig) else "cross-entropy"
