"""The stages of ``headrace bench gpu``, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.base.errors import ConfigError, nearest

PACKAGE = "headrace.wings.bench.gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """One stage: the module that measures, and its share of the time."""

    module: str
    """Python module with the function ``run``."""
    what: str
    """What the stage verifies and records, in words."""
    share_s: float
    """Its share of the budget, as seconds of a budget of ten minutes."""
    least_s: float = 8.0
    """Seconds below which it cannot measure anything, and is left out."""
    on_host: bool = False
    """Whether a device that only claims to be a GPU is of no use to the stage: with ``--pretend`` its kernels are run
    by Triton's interpreter."""


STAGES: Mapping[str, StageKind] = {
    "facts": StageKind(
        module=f"{PACKAGE}.facts", share_s=20, what="versions, memory, links, and the ceilings: copies and products"
    ),
    "kernels": StageKind(
        module=f"{PACKAGE}.kernels", share_s=60, on_host=True, what="every Triton kernel against float64"
    ),
    "exact": StageKind(
        module=f"{PACKAGE}.exact", share_s=70, what="engine against learner, and the contract of engines on the device"
    ),
    "engine": StageKind(
        module=f"{PACKAGE}.engine", share_s=90, what="tokens/s by the roofline; launches, waits, memory"
    ),
    "vllm": StageKind(module=f"{PACKAGE}.vllm", share_s=60, what="the same weights and requests in vLLM"),
    "learner": StageKind(module=f"{PACKAGE}.learner", share_s=90, what="training steps by the products; memory"),
    "sync": StageKind(module=f"{PACKAGE}.sync", share_s=50, what="versions from real steps; damage; commit gaps"),
    "sharing": StageKind(module=f"{PACKAGE}.sharing", share_s=50, what="sleep and wake on one GPU; lack of memory"),
    "demo": StageKind(module=f"{PACKAGE}.demo", share_s=130, what="a run learns, loses parts, and is resumed"),
    "soak": StageKind(module=f"{PACKAGE}.soak", share_s=30, what="whether memory stays flat"),
}
"""All stages by name."""


def chosen(names: str, known: Mapping[str, StageKind] = STAGES) -> Sequence[str]:
    """Return the stages that ``names``, a list with commas, chooses, in their usual order; all of them if it is empty.
    The first is always among them, since the rates of the others are divided by what it measures.

    Raises :class:`~headrace.base.errors.ConfigError` for an unknown name.

    >>> list(chosen("engine"))
    ['facts', 'engine']
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise ConfigError(f"--stages names {name!r}, and there is no such stage", remedy=nearest(name, known))
    first = next(iter(known))
    return [name for name in known if name in asked or name == first or not asked]
