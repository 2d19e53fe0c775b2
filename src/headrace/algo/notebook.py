"""The mathematics as plain functions on [B, T] tensors (B sequences of T tokens), for notebooks and checks. They use
the same code as a run. A *kind* is the name of a formula, and a *table* is its settings as a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.algo.advantages import ADVANTAGES, make_outcomes
from headrace.algo.advantages.outcomes import labels, to_list
from headrace.algo.base import BatchLayout, LossInputs, LossOutput, Ratio, to_tensor
from headrace.algo.config import AlgoConfig
from headrace.algo.corrections import CORRECTIONS
from headrace.algo.divergence import Estimator, estimate
from headrace.algo.losses import LOSSES, Custom
from headrace.algo.reductions import REDUCTIONS
from headrace.algo.registry import find, get_option_names, settings_table
from headrace.base.config import Section, validate
from headrace.base.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.algo.objective import Objective

Choice = str | Mapping[str, Any] | Section
"""A formula with its settings: a name, a table or a record of settings."""


def loss(
    name: str,
    *,
    log_pi: Any,
    advantages: Any,
    mask: Any,
    log_mu: Any = None,
    log_old: Any = None,
    log_ref: Any = None,
    versions: Any = None,
    version_now: int | None = None,
    correction: Choice | Sequence[Choice] | None = None,
    reduction: Choice | None = None,
    groups: Sequence[Any] | None = None,
    entropy: Any = None,
    **options: Any,
) -> LossOutput:
    """Compute the loss called ``name`` over a batch of padded sequences.

    ``log_pi`` [B, T] carries the gradient. Every other column is [B, T] too, ``advantages`` also [B] or [B, 1]; a
    single sequence may be [T]. Values outside ``mask`` have no effect. Without ``log_mu``, π_old sampled the tokens (a
    correction needs ``log_mu``); without ``versions``, all tokens have age 0, else their age is ``version_now`` minus
    their version; without ``groups`` ([B], a label for the prompt of each sequence), all sequences have the same prompt
    (for ``dpo``: each two consecutive sequences are a pair). ``correction`` and ``reduction`` are a name, a table or a
    settings record; ``None`` means no correction, and the reduction of the loss's paper. An option is assigned to the
    loss, correction or reduction that has it; if several have it, set it in a table. Options that a user's own loss
    does not declare are passed to its function.

    Returns the scalar loss with its gradient, the tokens' values [B, T] and the metrics, with ``ess`` and ``chi2`` of
    π/μ: ``float(out.metrics["ess"])``. A metric without counted tokens is NaN. Raises :class:`ConfigError` for an
    unknown or ambiguous name or option (the nearest is suggested), a required column that is missing, inconsistent
    shapes, and a correction that would count twice.

    >>> import torch
    >>> out = loss("dapo", log_pi=torch.tensor([[-0.5, -1.0]]), log_old=torch.tensor([[-0.5, -1.0]]),
    ...            advantages=[2.0], mask=[[1, 1]])
    >>> out.loss
    tensor(-2.)
    """
    from headrace.algo.objective import Objective

    objective = Objective.build(_config(name, correction, reduction, options))
    log_pi = _log_pi(log_pi)
    given = {"log_old": log_old, "log_mu": log_mu, "log_ref": log_ref, "entropy": entropy, "versions": versions}
    _refuse_missing(objective, {"advantages": advantages, "mask": mask, **given})
    if (versions is None) != (version_now is None):
        raise ConfigError("versions and version_now go together, one is missing", remedy="give both or neither")
    padded = _inputs({"log_pi": log_pi, "advantages": advantages, "mask": mask, **given}, groups, objective)
    return _run(objective, replace(padded, version_now=version_now or 0), log_pi)


def advantage(name: str, rewards: Sequence[Any], *, groups: Sequence[Any] | None = None, **options: Any) -> list[float]:
    """Return the advantage called ``name`` of each reward; ``None`` is a reward that does not count, with advantage 0.

    ``groups`` is a label of any kind for each reward; rewards with the same label share a baseline (by default all
    do). If rewards are compared within groups, a group of one, or one whose rewards are all the same, has advantage 0;
    groups may have different sizes. Columns that a formula needs in addition to rewards are keyword arguments, see
    :class:`~headrace.algo.advantages.outcomes.Outcomes`: ``lengths``, ``greedy``, ``agents``, ``baselines``,
    ``episodes``, ``states``, and per token, as one list per episode, ``process``, ``entropies``, ``segments``,
    ``energies``, ``log_mu``, ``log_nu``, ``values``. All other arguments are options. A formula per token returns one
    number per token of all episodes, concatenated.

    >>> advantage("rloo", [1, 0, None, 0])
    [1.0, -0.5, 0.0, -0.5]
    """
    kind = find(ADVANTAGES, "advantage", name)
    _refuse_unknown(options, {f"advantage {name!r}": kind}, extra=kind.reads)
    columns = {key: options.pop(key) for key in kind.reads if key in options}
    formula: Any = validate(kind, options)
    result: list[float] = formula(make_outcomes(rewards, groups, **columns)).tolist()
    return result


def kl(name: Estimator, log_pi: Any, log_ref: Any) -> Tensor:
    """Return the estimate of KL(π‖π_ref) per token, from log π (``log_pi``) and log π_ref (``log_ref``), for tensors of
    any shape. ``name`` is an estimator of :mod:`headrace.algo.divergence`."""
    if name not in ("k1", "k2", "k3"):
        raise ConfigError(f"kl {name!r} does not exist", remedy=nearest(str(name), ["k1", "k2", "k3"]))
    return estimate(name, to_tensor("log_pi", log_pi), to_tensor("log_ref", log_ref))


def _log_pi(given: Any) -> Tensor:
    """Return ``given``, the user's argument ``log_pi``, as a floating-point tensor. Raises
    :class:`~headrace.base.errors.ConfigError` unless its shape is [B, T] or [T]."""
    log_pi = to_tensor("log_pi", given)
    if log_pi.ndim not in (1, 2):
        raise ConfigError(f"log_pi has shape {tuple(log_pi.shape)}", remedy="give it [B, T], or [T] for one sequence")
    return log_pi if log_pi.is_floating_point() else log_pi.float()


def apply_options(loss: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``loss``, the table of settings of a loss, with ``options`` merged in. For a user's own loss, options that
    it does not declare become arguments of its function. Raises :class:`~headrace.base.errors.ConfigError` for an
    unknown option."""
    kind = find(LOSSES, "loss", loss["kind"])
    options = _set_function_options(kind, loss, options)
    _refuse_unknown(options, {loss["kind"]: kind})
    return {**loss, **options}


def _set_function_options(section_class: type[Any], loss: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options``. If the loss is a function of the user (``section_class`` is ``Custom``), options that are not
    settings of ``Custom`` are moved into its setting ``options``, the arguments of the function."""
    if section_class is not Custom:
        return dict(options)
    for_function = {key: value for key, value in options.items() if key not in get_option_names(section_class)}
    settings = {key: value for key, value in options.items() if key not in for_function}
    return {**settings, "options": {**settings.get("options", {}), **for_function}} if for_function else settings


def _config(
    name: str, correction: Choice | Sequence[Choice] | None, reduction: Choice | None, options: Mapping[str, Any]
) -> AlgoConfig:
    """Return the settings of ``[algo]`` for the arguments of :func:`loss`. Each option is written into the table of the
    only formula (loss, correction or reduction) that has this option and does not set it. Raises
    :class:`~headrace.base.errors.ConfigError` for unknown or ambiguous names and options."""
    if correction is None or correction == "none":
        correction = ()
    if not isinstance(correction, str | Mapping | Section | Sequence):
        raise ConfigError(f"correction {correction!r} is not a name", remedy="give a name, a table or a list of them")
    corrections = [correction] if isinstance(correction, str | Mapping | Section) else list(correction)
    loss_kind, loss_table = _table(LOSSES, "loss", name)
    parts = [
        ("loss", loss_kind, loss_table),
        *(("correction", *_table(CORRECTIONS, "correction", part)) for part in corrections),
        ("reduction", *_table(REDUCTIONS, "reduction", loss_kind.reduction if reduction is None else reduction)),
    ]
    options = _set_function_options(loss_kind, loss_table, options)
    _refuse_unknown(options, {str(table["kind"]): kind for _, kind, table in parts})
    given = [(f"{what} {table['kind']!r}", set(table), get_option_names(kind), table) for what, kind, table in parts]
    for key, value in options.items():
        _table_for_option(key, [row for row in given if key in row[2]])[key] = value
    _, *correction_tables, reduction_table = (table for _, _, table in parts)
    return validate(AlgoConfig, {"loss": loss_table, "correction": correction_tables, "reduction": reduction_table})


def _table_for_option(key: str, candidates: list[tuple[str, set[str], set[str], dict[str, Any]]]) -> dict[str, Any]:
    """Return the table that the option ``key`` belongs to. ``candidates`` are the formulas with this option: for each
    its name, the keys in its table, the names of all its options, and its table. Raises
    :class:`~headrace.base.errors.ConfigError` if all tables contain the option already, or if several do not."""
    free = [(name, table) for name, set_already, _, table in candidates if key not in set_already]
    if not free:
        names = " and ".join(name for name, *_ in candidates)
        raise ConfigError(f"option {key!r} is given twice: by itself, and for {names}", remedy="give it once")
    if len(free) > 1:
        names = " and ".join(name for name, _ in free)
        raise ConfigError(
            f"option {key!r} may be meant for {names}",
            remedy=f"give a correction as a table with its own: correction={{'kind': ..., {key!r}: ...}}",
        )
    return free[0][1]


def _table(union: Any, noun: str, choice: Choice) -> tuple[type[Any], dict[str, Any]]:
    """Return the settings class that ``choice`` names, and the table of settings that ``choice`` contains. ``union`` is
    the registry of the formulas, and ``noun`` is the noun for a formula in errors, such as ``loss``."""
    if isinstance(choice, Section):
        return type(choice), choice.model_dump()
    if not isinstance(choice, str | Mapping):
        find(union, noun, choice)
    table = settings_table(choice) if isinstance(choice, str) else dict(choice)
    return find(union, noun, str(table.get("kind", ""))), table


def _refuse_unknown(
    options: Mapping[str, Any], kinds: Mapping[str, type[Section]], extra: frozenset[str] = frozenset()
) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for an option that none of the formulas ``kinds`` (settings
    classes by name) has. The names ``extra`` are also allowed."""
    known = extra.union(*(get_option_names(kind) for kind in kinds.values()))
    for key in options:
        if key not in known:
            remedy = nearest(key, known) if known else "give no options"
            raise ConfigError(f"{' with '.join(kinds)} has no option {key!r}", remedy=remedy)


def _refuse_missing(objective: Objective, columns: Mapping[str, Any]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if a column that the objective reads is missing. ``log_old``
    replaces ``log_mu`` unless a correction reads ``log_mu``."""
    for name in ("advantages", "mask"):
        if columns[name] is None:
            raise ConfigError(f"{name} is missing", remedy=f"give {name}; what a loss does not look at may be 0")
    by_corrections = frozenset[str]().union(*(part.columns() for part in objective.corrections))
    for name in sorted(objective.columns & set(columns)):
        stands_in = name == "log_mu" and name not in by_corrections and columns["log_old"] is not None
        if columns[name] is None and not stands_in:
            raise ConfigError(f"{name} is missing, but the formula reads it", remedy=f"give {name}, shaped like log_pi")


def _inputs(given: Mapping[str, Any], groups: Sequence[Any] | None, objective: Objective) -> LossInputs:
    """Return the user's [B, T] columns ``given``, by name, in the form of a micro-batch of ``objective``: all sequences
    concatenated, padding included. ``groups`` are the labels of the sequences' prompts. Raises
    :class:`~headrace.base.errors.ConfigError` for columns of another shape."""
    import torch

    log_pi = given["log_pi"]
    shape = log_pi.shape if log_pi.ndim == 2 else (1, *log_pi.shape)
    num_sequences, length = shape
    groups = None if groups is None else to_list(groups, "groups")
    if groups is not None and len(groups) != num_sequences:
        raise ConfigError(f"groups has {len(groups)} rows, log_pi has {num_sequences}", remedy="give one per sequence")

    def column(name: str, dtype: torch.dtype, default: Tensor) -> Tensor:
        """Return column ``name`` as ``dtype``, flat, or ``default``; one advantage per sequence is repeated."""
        if given[name] is None:
            return default
        value = to_tensor(name, given[name]).to(log_pi.device)
        if dtype is torch.bool and not ((value == 0) | (value == 1)).all():
            raise ConfigError(f"{name} has entries other than 0 and 1", remedy="give 1 for what carries loss, else 0")
        value = value.to(dtype)
        if name == "advantages" and value.ndim == 1 and log_pi.ndim == 2:
            value = value[:, None]
        if name == "advantages" and value.shape == (num_sequences, 1):
            value = value.expand(shape)
        if value.shape not in (log_pi.shape, torch.Size(shape)):
            raise ConfigError(
                f"{name} has shape {tuple(value.shape)}, log_pi has {tuple(log_pi.shape)}",
                remedy=f"give {name} that shape",
            )
        return value.reshape(-1)

    flat_N = log_pi.reshape(-1)
    detached_N = flat_N.detach()
    real = torch.promote_types(flat_N.dtype, torch.float32)  # half precision is too coarse for differences
    log_old_N = column("log_old", real, detached_N)
    pairs_S = torch.arange(num_sequences, device=log_pi.device) // (
        2 if "pairs" in objective.columns else num_sequences or 1
    )
    return LossInputs(
        log_pi_N=flat_N,
        log_old_N=log_old_N.detach(),
        log_mu_N=column("log_mu", real, log_old_N).detach(),
        advantages_N=column("advantages", real, detached_N),
        mask_N=column("mask", torch.bool, detached_N.bool()),
        samples_N=torch.arange(num_sequences, device=log_pi.device).repeat_interleave(length),
        num_samples=num_sequences,
        versions_N=column("versions", torch.int64, torch.zeros_like(detached_N, dtype=torch.int64)),
        version_now=0,
        log_ref_N=None if given["log_ref"] is None else column("log_ref", real, detached_N).detach(),
        entropy_N=None if given["entropy"] is None else column("entropy", real, detached_N),
        groups_S=pairs_S if groups is None else torch.from_numpy(labels(groups)).to(log_pi.device),
    )


def _run(objective: Objective, inputs: LossInputs, log_pi: Tensor) -> LossOutput:
    """Compute the objective of ``inputs`` as a learner does, with the batch as one micro-batch. Return the result with
    the tokens' values in the shape of ``log_pi``, and with the derived metrics."""
    import torch

    from headrace.algo.metrics import derived_metrics, means
    from headrace.algo.objective import usable

    mask_N, dropped = usable(inputs.mask_N, inputs.log_mu_N)
    inputs = replace(inputs, mask_N=mask_N)
    assert inputs.groups_S is not None
    layout = BatchLayout(
        mask_N=mask_N,
        samples_N=inputs.samples_N,
        episodes_S=torch.arange(inputs.num_samples, device=mask_N.device),
        groups_S=inputs.groups_S,
    )
    weights_N = objective.weights(layout)
    inputs = replace(inputs, selected_NP=objective.prepare(replace(inputs, log_pi_N=inputs.log_pi_N.detach())))
    out = objective(inputs, weights_N)
    extra = {name: Ratio(value, 1.0) for name, value in derived_metrics(means(out.metrics)).items()}
    metrics = out.metrics | extra | {f"dropped/{reason}": Ratio(count, 1.0) for reason, count in dropped.items()}
    return LossOutput(loss=out.loss, tokens=out.tokens.reshape(log_pi.shape), metrics=metrics)
