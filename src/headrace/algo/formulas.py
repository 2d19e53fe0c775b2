"""The generator of ``docs/formulas.md``, the table of all formulas, from the docstrings:
``python -m headrace.algo.formulas > docs/formulas.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from headrace.algo.advantages import AnyAdvantage
from headrace.algo.bundles import BUNDLES
from headrace.algo.corrections import AnyCorrection
from headrace.algo.divergence import estimate
from headrace.algo.losses import AnyLoss
from headrace.algo.reductions import AnyReduction
from headrace.algo.registry import classes_by_kind, get_option_names
from headrace.algo.returns import gae, value_loss
from headrace.algo.shaping import AnyShaping
from headrace.base.config import descriptions
from headrace.base.types.metrics import LOSS_METRICS

HEAD = """\
# Formulas

Generated from the docstrings by `python -m headrace.algo.formulas`; do not edit.

π: the policy being trained. π_old: the policy that `algo.old` names. μ: the policy that sampled the token. π_ref: a
reference policy. ν: a teacher. r = π/π_old, ρ = π_old/μ, A: advantage, R: reward, sg: stop gradient, σ: the logistic
function, std: standard deviation, with n − 1 in the denominator (ddof 1) or n (ddof 0) as each formula says. Losses are
minimised. A token whose log μ is not finite is excluded from numerator and denominator, and counted.

Log-ratios are clamped to ±20, so that every exponential is finite. The clamp also applies inside squares ((log r)² of
`kimi`, `dro`, `ipo`, k2): the square of a token beyond the clamp has no gradient.

`algo.old = "engine"`: π_old is μ, so that r = π/μ and the loss's own clip accounts for older weights. Corrections
that read ρ, which is then 1, are refused: they would correct twice. This is the default of a run that trains tokens of
older weights (`flow.max_age` above 0), unless it sets a correction.
`algo.old = "learner"` (the default elsewhere): π_old is the learner's weights before this step's first update. If a
batch is one update, as by default, r is 1 in value: clips, caps on r, and penalties on (log r)² have no effect, and the
correction multiplies by ρ. `algo.epochs` and `algo.minibatches` make several updates. In a notebook, π_old is the
column `log_old`.
`algo.old = "sampled"`: π_old of a token is the learner's weights of the version that sampled the token, so that ρ is
only the mismatch of engine and learner, and r is the change by the updates since then.

The objective is Σ weight · (correction · loss + penalty) over tokens. All normalisation is in the weights, which are
computed from the masks of the whole batch.
"""

CHAPTERS: tuple[tuple[str, str, Any], ...] = (
    ("Losses", "`[algo.loss] kind = ...`", AnyLoss),
    (
        "Corrections",
        "`[algo.correction] kind = ...`, or a list of tables; at most one multiplies by ρ.",
        AnyCorrection,
    ),
    (
        "Reductions",
        "`[algo.reduction] kind = ...`. S and P count the sequences and prompts that have a token with loss, as verl "
        "does. TRL counts\nall sequences of a batch: its loss is smaller by the fraction of sequences without such a "
        "token, such as answers that a filter masks.",
        AnyReduction,
    ),
    (
        "Advantages",
        "`[algo.advantage] kind = ...`; 0 without counted rewards, and in a group of one unless it says otherwise.",
        AnyAdvantage,
    ),
    ("Shaping of rewards", "`[[algo.shaping]] kind = ...`", AnyShaping),
)


def document() -> str:
    """Return the whole text of ``docs/formulas.md``."""
    return "\n".join([HEAD, *_chapters(), *_functions(), *_bundles()])


def _chapters() -> Iterator[str]:
    """Yield the chapters of the document: a heading for each kind of formula, and an entry for each formula."""
    for title, note, union in CHAPTERS:
        yield f"## {title}\n\n{note}\n"
        for name, kind in classes_by_kind(union).items():
            yield from _entry(name, kind)


def _entry(name: str, section_class: type[Any]) -> Iterator[str]:
    """Yield the Markdown of one formula: its docstring and the table of its options."""
    yield f"### {name}\n\n{inspect.getdoc(section_class)}\n"
    if reduction := section_class.__dict__.get("reduction") or vars(section_class.__mro__[1]).get("reduction"):
        yield f"Reduction of the paper: {reduction}.\n"
    fields = {key: field for key, field in section_class.model_fields.items() if key in get_option_names(section_class)}
    if fields:
        meanings = descriptions(section_class)
        yield "| option | default | meaning |\n|---|---|---|"
        for key, field in fields.items():
            default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
            yield f"| `{key}` | {default} | {_table_cell(name, key, meanings.get(key))} |"
        yield ""


def _table_cell(name: str, key: str, description: str | None) -> str:
    """Return ``description``, the docstring of an option, as one line of a Markdown table. Raises ``LookupError``,
    which names the option ``key`` of the formula ``name``, if there is no docstring."""
    if not description:
        raise LookupError(f"option {key!r} of {name!r} has no docstring")
    return " ".join(description.split()).replace("``", "`").replace("|", "\\|")


def _functions() -> Iterator[str]:
    """Yield the Markdown of the chapters that do not describe settings: the KL estimators, the returns and the critic's
    loss, and the metrics."""
    yield "## Estimators of KL(π‖π_ref)\n\n`headrace.algo.kl`, and `algo.loss.kl` with `algo.loss.kl_coef` above 0.\n"
    yield _docstring_text(estimate) + "\n"
    yield "## Returns and the critic\n\n`headrace.algo.gae`; in a run: the advantage `gae`, `[learner.critic]`.\n"
    yield "### gae\n\n" + _docstring_text(gae) + "\n"
    yield "### value_loss\n\n" + _docstring_text(value_loss) + "\n"
    yield "## Metrics\n\nThe metrics of every step, and of `headrace.algo.loss(...).metrics`. w = π/μ.\n"
    yield "| metric | meaning |\n|---|---|"
    for row in LOSS_METRICS:
        yield f"| `{row.name}` | {row.meaning} |"
    yield ""


def _docstring_text(function: Callable[..., Any]) -> str:
    """Return the docstring of a function without its examples."""
    text, _, _ = (inspect.getdoc(function) or "").partition("\n>>>")
    return text.strip()


def _bundles() -> Iterator[str]:
    """Yield the chapter about the bundles, as a table."""
    yield (
        "## Bundles\n\n`algo.bundle = ...`; keys that are set beside it replace the bundle's. A run refuses `sft` and\n"
        "`dpo`, which need demonstrations and pairs: it has only what the model has sampled.\n"
    )
    yield "| bundle | settings |\n|---|---|"
    for name, tree in BUNDLES.items():
        yield f"| `{name}` | {'; '.join(f'{part}: {_format_settings(value)}' for part, value in tree.items())} |"
    yield ""


def _format_settings(value: Any) -> str:
    """Return a part of a bundle as text for the table: the kind of the formula, with its options in parentheses.
    Several corrections are joined by ``and``."""
    if isinstance(value, list):
        return " and ".join(_format_settings(part) for part in value)
    options = ", ".join(f"{key}={option}" for key, option in value.items() if key != "kind")
    return f"{value['kind']} ({options})" if options else str(value["kind"])


if __name__ == "__main__":
    sys.stdout.write(document())
