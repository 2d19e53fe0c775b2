"""Complete recipes by name (``algo.bundle``): an advantage, loss, correction and reduction that belong together. A
*tree* is the table ``[algo]`` of a run file, or a part of it, as nested dicts; a *kind* is the name of one formula."""

from __future__ import annotations

from typing import Any

from headrace.algo.registry import settings_table
from headrace.base.config import merge
from headrace.base.errors import ConfigError, nearest
from headrace.base.plugins import Registry

Tree = dict[str, Any]

_STD = {"kind": "grpo", "std": "ddof1"}
_MEAN = {"kind": "grpo", "std": "none"}
_GEOMETRIC = [{"kind": "sequence_tis", "level": "geometric"}]

BUNDLES: dict[str, Tree] = {
    "grpo": {"advantage": _STD, "loss": {"kind": "grpo"}},
    "dapo": {"advantage": _STD, "loss": {"kind": "dapo"}},
    "dr_grpo": {"advantage": _MEAN, "loss": {"kind": "dr_grpo"}, "reduction": {"kind": "constant", "normalizer": 1.0}},
    "gspo": {"advantage": _STD, "loss": {"kind": "gspo"}, "correction": _GEOMETRIC},
    "luspo": {"advantage": _STD, "loss": {"kind": "luspo"}, "correction": _GEOMETRIC},
    "gmpo": {"advantage": _STD, "loss": {"kind": "gmpo"}},
    "cispo": {"advantage": _STD, "loss": {"kind": "cispo", "anchor": "mu"}},
    "scalerl": {
        "advantage": {"kind": "reinforce_pp", "group_baseline": True},
        "loss": {"kind": "cispo", "anchor": "mu"},
        "reduction": {"kind": "prompt_mean"},
    },
    "sapo": {"advantage": _STD, "loss": {"kind": "sapo"}},
    "vespo": {"advantage": _MEAN, "loss": {"kind": "vespo"}},
    "decoupled": {"advantage": _STD, "loss": {"kind": "grpo"}, "correction": [{"kind": "decoupled"}]},
    "a3po": {"advantage": _STD, "loss": {"kind": "grpo"}, "correction": [{"kind": "loglinear"}]},
    "icepop": {"advantage": _STD, "loss": {"kind": "grpo"}, "correction": [{"kind": "icepop"}]},
    "tis_opsm": {"advantage": _STD, "loss": {"kind": "grpo"}, "correction": [{"kind": "tis"}, {"kind": "opsm"}]},
    "m2po": {"advantage": _STD, "loss": {"kind": "m2po"}},
    "dppo": {"advantage": _MEAN, "loss": {"kind": "dppo", "anchor": "mu"}},
    "ipo": {"advantage": _MEAN, "loss": {"kind": "ipo"}},
    "rloo": {"advantage": {"kind": "rloo"}, "loss": {"kind": "reinforce"}},
    "reinforce_pp": {"advantage": {"kind": "reinforce_pp"}, "loss": {"kind": "dapo", "clip_high": 0.2}},
    "remax": {"advantage": {"kind": "remax"}, "loss": {"kind": "reinforce"}},
    "opo": {"advantage": {"kind": "opo"}, "loss": {"kind": "reinforce"}},
    "maxrl": {"advantage": {"kind": "maxrl"}, "loss": {"kind": "reinforce"}},
    "gdpo": {"advantage": {"kind": "gdpo"}, "loss": {"kind": "grpo"}},
    "topr": {"advantage": _MEAN, "loss": {"kind": "topr"}},
    "kimi": {"advantage": _MEAN, "loss": {"kind": "kimi"}},
    "dro": {"advantage": _MEAN, "loss": {"kind": "dro"}},
    "clip_cov": {"advantage": _STD, "loss": {"kind": "clip_cov"}},
    "kl_cov": {"advantage": _STD, "loss": {"kind": "kl_cov"}},
    "aspo": {"advantage": _STD, "loss": {"kind": "aspo"}},
    "distill": {"advantage": {"kind": "reverse_kl"}, "loss": {"kind": "reinforce"}},
    "sft": {"loss": {"kind": "ce"}},
    "dpo": {"advantage": _MEAN, "loss": {"kind": "dpo"}},
}
"""The recipes of Headrace's core. ``dr_grpo`` needs ``reduction.normalizer``, the largest number of tokens of an
answer.

If a bundle leaves out the reduction, its loss determines it: the reduction of its paper. If a bundle leaves out the
correction, it is ``tis``, or none for a loss whose ratio is relative to μ."""


OFFERED = Registry[Tree](
    group="headrace.bundles",
    setting="algo.bundle",
    check=lambda made: None if isinstance(made, dict) else "is not a table of algo's keys",
)
"""The bundles that installed packages (plugins) register. Each is a table like those of :data:`BUNDLES`."""


def expand(tree: Tree) -> Tree:
    """Return the complete table ``[algo]`` for ``tree``, the table as a run file contains it. The plain name of a
    formula becomes a table, such as ``{"kind": "dapo"}`` for ``"dapo"``. If ``bundle`` names a bundle, the result is
    merged over the tables of that bundle.

    A table whose kind differs from the kind of the bundle's table replaces it as a whole. A table of the same kind, or
    without a kind, overrides only the keys that it contains. Corrections replace those of the bundle. Raises
    :class:`~headrace.base.errors.ConfigError` for an unknown bundle.

    >>> expand({"bundle": "dapo", "loss": {"clip_high": 0.3}})["loss"]
    {'kind': 'dapo', 'clip_high': 0.3}
    """
    tree = {key: _as_table(key, value) for key, value in tree.items()}
    name = tree.get("bundle")
    if name is None:
        return tree
    if name in BUNDLES:
        bundle = BUNDLES[name]
    elif name in OFFERED:
        bundle = OFFERED.load(name)
    else:
        raise ConfigError(f"algo.bundle={name!r} does not exist", remedy=nearest(str(name), {*BUNDLES, *OFFERED}))
    return merge(bundle, tree, whole_kinds=True)


def _as_table(key: str, value: Any) -> Any:
    """Return the value of ``key`` in ``[algo]`` with each name of a formula replaced by a table of that kind. For
    corrections, the result is a tuple of tables, which is empty for ``"none"``. Other values are returned unchanged."""
    if key == "correction":
        if isinstance(value, str | dict):
            value = [] if value == "none" else [value]
        if not isinstance(value, list | tuple):
            return value
        return tuple(settings_table(part) if isinstance(part, str) else part for part in value)
    if key in ("loss", "advantage", "reduction") and isinstance(value, str):
        return settings_table(value)
    return value
