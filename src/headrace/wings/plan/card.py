"""The rates of a GPU that ``headrace bench gpu`` has measured. ``headrace plan --calibrate FILE`` replaces the GPU's
figures in the catalogue, and the assumed fractions of these figures that software reaches, by the measured rates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, DataError
from headrace.wings.plan.catalogue import accelerators
from headrace.wings.plan.cluster import Cluster

FORMAT = 1
"""Version of the file format that this module reads."""


_MEASURED = frozenset({"decode_share", "train_share", "peak_tflops", "bandwidth_gb_s", "generation_tok_s"})
"""The settings of a cluster file that a measured file replaces; a cluster file must not set them as well."""


class CardRates(msgspec.Struct, frozen=True, kw_only=True):
    """The measured rates of one GPU; ``None`` for a rate that has not been measured."""

    card: str
    """Name of the GPU."""
    copy_device_gb_s: float | None = None
    """Rate of copies within the GPU's memory, read and written bytes counted, in 10⁹ bytes per second."""
    product_bfloat16_tflops: float | None = None
    """Rate of matrix products in bfloat16, in 10¹² operations per second."""
    decode_share: float | None = None
    """Fraction of the roofline, computed from the two rates above, that decoding reaches with a large batch."""
    train_share: float | None = None
    """Fraction of ``product_bfloat16_tflops`` that a training step reaches."""
    overhead_s: float | None = None
    """Fixed seconds of an engine step, in addition to reading memory and computing."""
    sync_gb_s: float | None = None
    """Rate at which a version of the weights is transferred within one machine, in 10⁹ bytes per second."""


class _CardFile(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the file that this module reads."""

    format: int
    pretend: bool
    rates: CardRates


def read_rates(path: Path) -> CardRates:
    """Return the rates in the file ``path``, which ``headrace bench gpu`` has written. Raises
    :class:`~headrace.base.errors.DataError` if the file has another format, if it was written with ``--pretend``, or if
    it lacks a rate that a plan needs."""
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


def apply_rates(rates: CardRates, cluster: Cluster) -> Cluster:
    """Return a copy of ``cluster`` with the measured rates in place of the catalogue's figures. Measured fractions are
    limited to 1.

    Raises :class:`~headrace.base.errors.ConfigError` if the rates were measured on another GPU than the cluster's, or
    if the cluster file sets one of these rates itself.
    """
    known = {name.casefold() for name in accelerators()}
    if cluster.accelerator.casefold() in known and not _name_words(cluster.accelerator) <= _name_words(rates.card):
        raise ConfigError(
            f"cluster.accelerator={cluster.accelerator!r}, and --calibrate was measured on {rates.card}",
            remedy="name that GPU in the cluster file, or measure on the cluster's",
        )
    conflicting = cluster.model_fields_set & _MEASURED
    if conflicting:
        raise ConfigError(
            f"cluster.{min(conflicting)} is given, and --calibrate has measured it", remedy="leave one of the two out"
        )
    measured: dict[str, Any] = {
        "peak_tflops": rates.product_bfloat16_tflops,
        "bandwidth_gb_s": rates.copy_device_gb_s,
        "decode_share": min(1.0, rates.decode_share or 1.0),
        "train_share": min(1.0, rates.train_share or 1.0),
    }
    return cluster.model_copy(update=measured)


def _name_words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name from the catalogue or from the driver. The words for memory size and slot are
    left out, because catalogue and driver write them differently.

    >>> sorted(_name_words("RTX-4090")), sorted(_name_words("A100-40GB"))
    (['4090', 'rtx'], ['a100'])
    """
    words = re.split(r"[\s_/-]+", name.casefold())
    return frozenset(word for word in words if not re.fullmatch(r"pcie|sxm\d?|\d+gb", word))
