"""The table of the stages of ``headrace bench gpu``, in their order, and the choice of stages by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.base.errors import ConfigError, nearest

PACKAGE = "headrace.wings.bench.gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """One stage: the module that measures, and its share of the time budget."""

    module: str
    """The Python module with the function ``run``."""
    description: str
    """The description of the stage's measurements, in words."""
    share_s: float
    """The share of the stage, in seconds of a budget of ten minutes."""
    min_s: float = 8.0
    """The time limit, in seconds, below which the stage is left out, since it could not measure anything."""
    on_host: bool = False
    """True if the stage does not use the claimed device: with ``--pretend`` Triton's interpreter runs its kernels on
    the CPU."""


STAGES: Mapping[str, StageKind] = {
    "facts": StageKind(
        module=f"{PACKAGE}.facts",
        share_s=20,
        description="versions, memory, links, and the ceilings: copies and products",
    ),
    "kernels": StageKind(
        module=f"{PACKAGE}.kernels", share_s=60, on_host=True, description="every Triton kernel against float64"
    ),
    "exact": StageKind(
        module=f"{PACKAGE}.exact",
        share_s=70,
        description="engine against learner, and the contract of engines on the device",
    ),
    "engine": StageKind(
        module=f"{PACKAGE}.engine", share_s=90, description="tokens/s by the roofline; launches, waits, memory"
    ),
    "vllm": StageKind(module=f"{PACKAGE}.vllm", share_s=60, description="the same weights and requests in vLLM"),
    "learner": StageKind(module=f"{PACKAGE}.learner", share_s=90, description="training steps by the products; memory"),
    "sync": StageKind(
        module=f"{PACKAGE}.sync", share_s=50, description="versions from real steps; damage; commit gaps"
    ),
    "sharing": StageKind(
        module=f"{PACKAGE}.sharing", share_s=50, description="sleep and wake on one GPU; lack of memory"
    ),
    "demo": StageKind(module=f"{PACKAGE}.demo", share_s=130, description="a run learns, loses parts, and is resumed"),
    "soak": StageKind(module=f"{PACKAGE}.soak", share_s=30, description="whether memory stays flat"),
}
"""All stages by name."""


def choose_stages(names: str, known: Mapping[str, StageKind] = STAGES) -> Sequence[str]:
    """Return the stages in ``names``, which are separated by commas, in the usual order; all stages if ``names`` is
    empty. The first stage is always included, since the rates of other stages are compared with its measurements.

    Raises :class:`~headrace.base.errors.ConfigError` for an unknown name.

    >>> list(choose_stages("engine"))
    ['facts', 'engine']
    """
    requested = [name.strip() for name in names.split(",") if name.strip()]
    for name in requested:
        if name not in known:
            raise ConfigError(f"--stages names {name!r}, and there is no such stage", remedy=nearest(name, known))
    first = next(iter(known))
    return [name for name in known if name in requested or name == first or not requested]
