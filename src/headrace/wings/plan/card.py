"""The rates of a GPU that ``headrace bench gpu`` has measured: ``headrace plan --calibrate FILE`` replaces the figures
of the catalogue, and the shares of them that software is assumed to reach, by these."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, DataError
from headrace.wings.plan.catalogue import accelerators
from headrace.wings.plan.cluster import Cluster

FORMAT = 1
"""Number of the format of the file."""


_MEASURED = frozenset({"decode_share", "train_share", "peak_tflops", "bandwidth_gb_s", "generation_tok_s"})
"""The settings of a cluster file that a file of measurements stands for."""


class CardRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of one GPU; ``None`` for those that have not been measured."""

    card: str
    """Name of the GPU."""
    copy_device_gb_s: float | None = None
    """Rate of copies within its memory, reading and writing counted, in 10⁹ bytes per second."""
    product_bfloat16_tflops: float | None = None
    """Rate of products in bfloat16, in 10¹² operations per second."""
    decode_share: float | None = None
    """Share of the roofline of these two that decoding reaches with a large batch."""
    train_share: float | None = None
    """Share of the rate of products that a training step reaches."""
    overhead_s: float | None = None
    """Seconds of a step of the engine beside reading and computing."""
    sync_gb_s: float | None = None
    """Rate at which a version of the weights travels on one machine, in 10⁹ bytes per second."""


class _CardFile(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the file that is read here."""

    format: int
    pretend: bool
    rates: CardRates


def read_rates(path: Path) -> CardRates:
    """Return the rates in the file ``path`` of ``headrace bench gpu``. Raises
    :class:`~headrace.base.errors.DataError` if it is no such file, if its GPU only claimed to be one, or if what a plan
    needs was not measured."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_CardFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(
            f"--calibrate {path} is neither the directory of a run nor a file of headrace bench gpu: {error}",
            remedy="name one of the two",
        ) from None
    if found.format != FORMAT:
        raise DataError(
            f"--calibrate {path} has format {found.format}, and {FORMAT} is read",
            remedy="measure again: headrace bench gpu",
        )
    if found.pretend:
        raise DataError(
            f"--calibrate {path} was made with --pretend: its figures are those of no GPU",
            remedy="measure on a GPU: headrace bench gpu",
        )
    for name in ("copy_device_gb_s", "product_bfloat16_tflops", "decode_share", "train_share"):
        if not msgspec.structs.asdict(found.rates)[name]:
            raise DataError(
                f"--calibrate {path} has no {name}: a stage was left out or failed",
                remedy="measure it: headrace bench gpu --stages facts,engine,learner",
            )
    return found.rates


def on_cluster(rates: CardRates, cluster: Cluster) -> Cluster:
    """Return the cluster with the measured rates in place of the catalogue's figures and shares. A share is at most 1.

    Raises :class:`~headrace.base.errors.ConfigError` if the rates are those of another GPU of the catalogue, or if the
    cluster file gives rates itself.
    """
    known = {name.casefold() for name in accelerators()}
    if cluster.accelerator.casefold() in known and not _words(cluster.accelerator) <= _words(rates.card):
        raise ConfigError(
            f"cluster.accelerator={cluster.accelerator!r}, and --calibrate was measured on {rates.card}",
            remedy="name that GPU in the cluster file, or measure on the cluster's",
        )
    given = cluster.model_fields_set & _MEASURED
    if given:
        raise ConfigError(
            f"cluster.{min(given)} is given, and --calibrate has measured it", remedy="leave one of the two out"
        )
    measured: dict[str, Any] = {
        "peak_tflops": rates.product_bfloat16_tflops,
        "bandwidth_gb_s": rates.copy_device_gb_s,
        "decode_share": min(1.0, rates.decode_share or 1.0),
        "train_share": min(1.0, rates.train_share or 1.0),
    }
    return cluster.model_copy(update=measured)


def _words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name, as the catalogue or the driver gives it, without those for its memory and its
    slot, which the two write differently.

    >>> sorted(_words("RTX-4090")), sorted(_words("A100-40GB"))
    (['4090', 'rtx'], ['a100'])
    """
    words = re.split(r"[\s_/-]+", name.casefold())
    return frozenset(word for word in words if not re.fullmatch(r"pcie|sxm\d?|\d+gb", word))
