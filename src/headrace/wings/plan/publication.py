"""A model of the time of one publication. Each rank of the learner has a part of the weights, and each engine needs all
weights: an engine receives them as an image in host memory, from which it loads them (the uptake).

    rank ──copy──▶ slot ──hash──▶ agree ══broadcast══▶ image beside each engine ──verify──▶ uptake ──▶ commit
     learner waits                          while training and decoding go on                        engine waits

With any transport but process groups, rank 0 sends the whole version, and only rank 0 copies and hashes. The phases
follow each other, as in :mod:`headrace.sync`. The duration of a phase is that of its slowest resource: one thread, the
cores of a machine, its memory, or its network link.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from headrace.wings.plan.catalogue import HostFigures

GB = 1e9
"""Number of bytes in the unit of the rates."""
SWAP_S = 0.005
"""Fixed time of every commit, in seconds."""
SOCKET_PASSES = 3
"""Number of memory accesses per byte on each side of a connection: one to the program's buffer, and two to the kernel's
copy of the byte, which is written and read."""


class EngineUptake(StrEnum):
    """The method by which an engine loads the verified image of a version from host memory."""

    POINTERS = "pointers"
    """The parameters become views of the image: an embedded engine on processors."""
    UPLOAD = "upload"
    """The image is copied to the accelerator while the engine decodes; at the commit the parameters become views of the
    copy: an embedded engine on an accelerator."""
    FILES = "files"
    """The image is written to files, which a model server (vLLM, SGLang) loads while it does not decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRequest:
    """The inputs from which the time of one publication is computed."""

    image_bytes: float
    """Number of bytes of all weights in the codec's number format. All of them are copied, hashed and verified."""
    sent_bytes: float
    """Number of bytes that are sent; fewer than ``image_bytes`` for codecs that send differences."""
    ranks: Sequence[int]
    """Machine number of each rank of the learner."""
    engines: Sequence[int]
    """Machine number of each engine."""
    width: int = 1
    """Number of accelerators of one engine."""
    uptake: EngineUptake = EngineUptake.UPLOAD
    """The method by which an engine loads the verified image."""
    fixed_s: float = 0.05
    """Seconds of messages, independent of the size of a version: the ranks exchange their hashes, and the update is
    announced to the engines."""
    rate_gb_s: float | None = None
    """Rate, in 10⁹ bytes per second, of a transport by which rank 0 sends the whole version; ``None``: process groups,
    in which every rank broadcasts its part."""
    on_accelerator: bool = True
    """Whether the learner's weights are in accelerator memory, and not in host memory."""


class PublicationPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a publication."""

    name: str
    """Name of the phase, such as ``copy`` or ``broadcast``."""
    seconds: float
    """Duration of the phase."""
    limit: str
    """The slowest resource of the phase, which determines its duration, in words."""


class PublicationEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted time of one publication, phase by phase."""

    copy: PublicationPhase
    """The copy of each rank's part into a slot, during which the learner does not train."""
    travel: tuple[PublicationPhase, ...]
    """The phases after the copy, until every engine's machine has a verified image; training and decoding continue."""
    uptake: PublicationPhase
    """The copy of the image to the engine's accelerators or files; decoding continues."""
    commit: PublicationPhase
    """The exchange of the weights in use, during which the engines do not decode."""
    moved_bytes: dict[str, float]
    """Number of bytes by kind, over all machines: ``accelerator links`` (between accelerators and host memory),
    ``hashed`` and ``files``; with process groups also ``network`` (between machines) and ``within machines``
    (loopback)."""

    @property
    def phases(self) -> tuple[PublicationPhase, ...]:
        """Return all phases in order."""
        return (self.copy, *self.travel, self.uptake, self.commit)

    @property
    def travel_s(self) -> float:
        """Return the seconds between copy and commit, in which both training and decoding continue."""
        return sum(phase.seconds for phase in self.travel) + self.uptake.seconds


def _zero_by_machine() -> dict[int, float]:
    """Return an empty mapping from machine numbers to amounts; a missing amount is 0."""
    return defaultdict(float)


@dataclass(slots=True)
class _PhaseLoad:
    """The load of one phase on the machines, from which the duration of the phase is computed."""

    host: HostFigures
    """The rates of every machine."""
    thread_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the busiest thread, by kind of thread."""
    core_s: dict[int, float] = field(default_factory=_zero_by_machine)
    """Summed seconds of cores, by machine."""
    memory_bytes: dict[int, float] = field(default_factory=_zero_by_machine)
    """Bytes that are read from or written to memory, by machine."""
    out_bytes: dict[int, float] = field(default_factory=_zero_by_machine)
    """Bytes that are sent over the network, by sending machine."""
    in_bytes: dict[int, float] = field(default_factory=_zero_by_machine)
    """Bytes that are received over the network, by receiving machine."""

    def work(self, machine: int, thread: str, seconds: float, num_bytes: float) -> None:
        """Add the load of a thread of the kind ``thread`` that runs for ``seconds`` on ``machine``, and reads or writes
        ``num_bytes`` of memory."""
        self.thread_s[thread] = max(self.thread_s.get(thread, 0.0), seconds)
        self.core_s[machine] += seconds
        self.memory_bytes[machine] += num_bytes

    def carry(self, sender: int, receiver: int, num_bytes: float) -> None:
        """Add ``num_bytes`` that the machine ``sender`` sends to ``receiver``; nothing is added if both are equal."""
        if sender != receiver:
            self.out_bytes[sender] += num_bytes
            self.in_bytes[receiver] += num_bytes

    def phase(self, name: str) -> PublicationPhase:
        """Return the phase called ``name`` with this load. Its duration is that of the slowest resource."""
        host = self.host
        cores, link = host.cores or 1, host.link_gb_s * host.links * GB
        waits = dict(self.thread_s)
        for words, amounts, rate in (
            ("the cores of a machine", self.core_s, cores),
            ("the memory of a machine", self.memory_bytes, host.memory_gb_s * GB),
            ("what leaves a machine over the network", self.out_bytes, link),
            ("what reaches a machine over the network", self.in_bytes, link),
        ):
            waits[words] = max(amounts.values(), default=0.0) / rate
        limit = max(waits, key=waits.__getitem__)
        return PublicationPhase(name=name, seconds=waits[limit], limit=limit)


def tree_edges(size: int) -> list[tuple[int, int]]:
    """Return the pairs (sender, receiver) of a broadcast by Gloo from member 0 to the other ``size`` − 1 members of a
    group: a binomial tree (gloo/broadcast.cc).

    >>> tree_edges(5)
    [(0, 1), (0, 2), (1, 3), (0, 4)]
    """
    rounds = range((size - 1).bit_length())
    return [(sender, sender + 2**step) for step in rounds for sender in range(2**step) if sender + 2**step < size]


def estimate_publication(request: PublicationRequest, host: HostFigures) -> PublicationEstimate:
    """Return the predicted time of the publication ``request`` among machines with the rates of ``host``."""
    if request.rate_gb_s is None:
        load, moved = _broadcast_load(request, host)
        send = load.phase("broadcast")
    else:
        send, moved = _send_whole(request), {}
    copy, hashing, verify = (_PhaseLoad(host) for _ in range(3))
    part = request.image_bytes / len(request.ranks)
    copied_s = part / ((host.down_gb_s if request.on_accelerator else host.copy_gb_s) * GB)
    for machine in request.ranks:
        # a copy within host memory reads and writes each byte there, a copy from the accelerator only writes it
        copy.work(machine, "one rank's copy", copied_s, part if request.on_accelerator else 2 * part)
        hashing.work(machine, "one rank's thread", part / (host.hash_gb_s * GB), part)
    for machine in request.engines:
        seconds = request.image_bytes / (host.hash_gb_s * GB)
        verify.work(machine, "one engine's thread", seconds, request.image_bytes)
    uptake, commit = _uptake_and_commit(request, host)
    uploaded = len(request.engines) * request.image_bytes
    moved |= {
        "accelerator links": (request.image_bytes if request.on_accelerator else 0.0)
        + (0.0 if request.uptake is EngineUptake.POINTERS else uploaded),
        "hashed": request.image_bytes + uploaded,
        "files": uploaded if request.uptake is EngineUptake.FILES else 0.0,
    }
    agree = PublicationPhase(name="agree", seconds=request.fixed_s, limit="messages")
    return PublicationEstimate(
        copy=copy.phase("copy"),
        travel=(hashing.phase("hash"), agree, send, verify.phase("verify")),
        uptake=uptake,
        commit=commit,
        moved_bytes=moved,
    )


def _send_whole(request: PublicationRequest) -> PublicationPhase:
    """Return the sending phase of a transport by which rank 0 sends the whole version at the rate
    ``request.rate_gb_s``."""
    assert request.rate_gb_s is not None
    return PublicationPhase(
        name="send", seconds=request.sent_bytes / (request.rate_gb_s * GB), limit="the rate of the transport"
    )


def _broadcast_load(request: PublicationRequest, host: HostFigures) -> tuple[_PhaseLoad, dict[str, float]]:
    """Return the load of the broadcasts of all ranks of ``request`` among machines with the rates of ``host``, which
    run at the same time, and the number of bytes that they send over the ``network`` and ``within machines``."""
    load, part = _PhaseLoad(host), request.sent_bytes / len(request.ranks)
    edges, moved = tree_edges(1 + len(request.engines)), {"network": 0.0, "within machines": 0.0}
    stream = host.stream_gb_s * GB

    def carried(sender: int, receiver: int, num_bytes: float) -> None:
        """Count ``num_bytes`` that the machine ``sender`` sends to ``receiver``, which may be the same machine."""
        load.carry(sender, receiver, num_bytes)
        moved["within machines" if sender == receiver else "network"] += num_bytes

    ends = Counter(member for edge in edges for member in edge)
    roots = [receiver for sender, receiver in edges if sender == 0]
    for machine in request.ranks:
        load.work(machine, "one rank's connections", ends[0] * part / stream, ends[0] * SOCKET_PASSES * part)
        for member in roots:
            carried(machine, request.engines[member - 1], part)
    # engines forward along the same edges in the group of every rank, so all bytes are counted at once
    for sender, receiver in edges:
        if sender:
            carried(request.engines[sender - 1], request.engines[receiver - 1], request.sent_bytes)
    for member, machine in enumerate(request.engines, 1):
        seconds = ends[member] * part / stream
        load.work(machine, "one engine's connections", seconds, ends[member] * SOCKET_PASSES * request.sent_bytes)
        load.core_s[machine] += (len(request.ranks) - 1) * seconds
    return load, moved


def _uptake_and_commit(request: PublicationRequest, host: HostFigures) -> tuple[PublicationPhase, PublicationPhase]:
    """Return the phase in which engines load a verified image, and the phase in which they commit it."""
    image, commit = request.image_bytes, PublicationPhase(name="commit", seconds=SWAP_S, limit="the exchange")
    if request.uptake is EngineUptake.POINTERS:
        return PublicationPhase(name="none", seconds=0.0, limit="nothing"), commit
    load = _PhaseLoad(host)
    rate = (host.up_gb_s if request.uptake is EngineUptake.UPLOAD else host.copy_gb_s) * GB
    for machine in request.engines:
        load.work(machine, "one engine's thread", image / rate, 2 * image)
    if request.uptake is EngineUptake.UPLOAD:
        return load.phase("upload"), commit
    most = max(Counter(request.engines).values())
    rate = min(host.load_gb_s * request.width, host.load_most_gb_s / most) * GB
    return load.phase("write files"), PublicationPhase(name="load files", seconds=image / rate, limit="the server")
