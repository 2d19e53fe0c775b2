"""The time of one publication: from the ranks of the learner, each of which holds a part of the weights, to the
engines, each of which needs them all.

    rank ──copy──▶ slot ──hash──▶ agree ══broadcast══▶ image beside each engine ──verify──▶ uptake ──▶ commit
     learner waits                          while training and decoding go on                        engine waits

Where rank 0 sends the whole version instead (any transport but process groups), it is the only one that copies and
hashes. The phases follow each other, as in :mod:`headrace.sync`. In each of them several things can be the slowest: one
thread, the cores of a machine, its memory, or its link to the network. A phase takes as long as the slowest of these.
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
"""How often one side of a connection touches a byte in memory: the program's buffer, and the kernel's copy of it, which
is written and read."""


class EngineUptake(StrEnum):
    """The way by which an engine takes a verified image in host memory into use."""

    POINTERS = "pointers"
    """The parameters become views of the image: an embedded engine on processors."""
    UPLOAD = "upload"
    """The image is copied to the accelerator beside decoding, and then the parameters point to the copy: an embedded
    engine on an accelerator."""
    FILES = "files"
    """The image is written to files, which a server of models loads while it stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRequest:
    """One publication whose time is wanted."""

    image_bytes: float
    """Number of bytes of the whole weights, as the codec represents them. All are copied, hashed and verified."""
    sent_bytes: float
    """Number of those bytes that are sent: fewer for differences."""
    ranks: Sequence[int]
    """For each rank of the learner, the number of its machine."""
    engines: Sequence[int]
    """For each engine, the number of its machine."""
    width: int = 1
    """Number of accelerators of one engine."""
    uptake: EngineUptake = EngineUptake.UPLOAD
    """The way by which an engine takes the verified image into use."""
    fixed_s: float = 0.05
    """Seconds of messages, however large the version is: the ranks exchange their hashes, and the update is announced
    to the engines."""
    rate_gb_s: float | None = None
    """Rate, in 10⁹ bytes per second, of a transport by which rank 0 alone sends the whole version, which every engine
    fetches or views; ``None``: process groups, in which every rank broadcasts its part."""
    on_accelerator: bool = True
    """Whether the learner's weights are in the memory of accelerators."""


class PublicationPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a publication."""

    name: str
    """What is done."""
    seconds: float
    """How long it takes."""
    limit: str
    """What it waits for, in words."""


class PublicationEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted time of one publication, phase by phase."""

    copy: PublicationPhase
    """Each rank copies its part into a slot; the learner stands still."""
    travel: tuple[PublicationPhase, ...]
    """What follows beside training and decoding, until a verified image is beside every engine."""
    uptake: PublicationPhase
    """The engines bring the image to where they compute, beside decoding."""
    commit: PublicationPhase
    """The engines take it into use, and stand still."""
    moved_bytes: dict[str, float]
    """Number of bytes that are moved, over all machines: ``accelerator links`` between accelerators and host memory,
    ``hashed`` and ``files``; with process groups, ``network`` from machine to machine, and ``within machines`` over
    their loopback."""

    @property
    def phases(self) -> tuple[PublicationPhase, ...]:
        """Return all phases in order."""
        return (self.copy, *self.travel, self.uptake, self.commit)

    @property
    def travel_s(self) -> float:
        """Return the seconds for which neither side stands still."""
        return sum(phase.seconds for phase in self.travel) + self.uptake.seconds

    @property
    def received_s(self) -> float:
        """Return the seconds from the learner's step until a verified image is beside every engine."""
        return self.copy.seconds + sum(phase.seconds for phase in self.travel)

    @property
    def total_s(self) -> float:
        """Return the seconds from the learner's step until every engine uses the version."""
        return sum(phase.seconds for phase in self.phases)


def _zeros() -> dict[int, float]:
    """Return an amount for each machine, all of them 0 at first."""
    return defaultdict(float)


@dataclass(slots=True)
class _PhaseLoad:
    """What one phase asks of the machines."""

    host: HostFigures
    thread_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the busiest thread of each kind."""
    core_s: dict[int, float] = field(default_factory=_zeros)
    """Seconds of cores, by machine."""
    memory_bytes: dict[int, float] = field(default_factory=_zeros)
    """Bytes that are read or written in memory, by machine."""
    out_bytes: dict[int, float] = field(default_factory=_zeros)
    """Bytes that leave a machine, by machine."""
    in_bytes: dict[int, float] = field(default_factory=_zeros)
    """Bytes that reach a machine, by machine."""

    def work(self, machine: int, who: str, seconds: float, num_bytes: float) -> None:
        """Add a thread of the kind ``who`` that computes for ``seconds`` on ``machine``, and reads or writes
        ``num_bytes`` meanwhile."""
        self.thread_s[who] = max(self.thread_s.get(who, 0.0), seconds)
        self.core_s[machine] += seconds
        self.memory_bytes[machine] += num_bytes

    def carry(self, sender: int, receiver: int, num_bytes: float) -> None:
        """Add ``num_bytes`` that are sent from one machine to another, or within one."""
        if sender != receiver:
            self.out_bytes[sender] += num_bytes
            self.in_bytes[receiver] += num_bytes

    def phase(self, name: str) -> PublicationPhase:
        """Return the phase called ``name`` with this load: as long as the slowest takes."""
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
    """Return the sends (sender, receiver) of a broadcast by Gloo among ``size`` members, of which number 0 is the root:
    a binomial tree (gloo/broadcast.cc).

    >>> tree_edges(5)
    [(0, 1), (0, 2), (1, 3), (0, 4)]
    """
    rounds = range((size - 1).bit_length())
    return [(sender, sender + 2**step) for step in rounds for sender in range(2**step) if sender + 2**step < size]


def publish(request: PublicationRequest, host: HostFigures) -> PublicationEstimate:
    """Return the predicted time of a publication among machines with the figures of ``host``."""
    if request.rate_gb_s is None:
        load, moved = _send(request, host)
        send = load.phase("broadcast")
    else:
        send, moved = _send_whole(request), {}
    copy, hashing, verify = (_PhaseLoad(host) for _ in range(3))
    part = request.image_bytes / len(request.ranks)
    copied_s = part / ((host.down_gb_s if request.on_accelerator else host.copy_gb_s) * GB)
    for machine in request.ranks:
        copy.work(machine, "one rank's copy", copied_s, part if request.on_accelerator else 2 * part)
        hashing.work(machine, "one rank's thread", part / (host.hash_gb_s * GB), part)
    for machine in request.engines:
        seconds = request.image_bytes / (host.hash_gb_s * GB)
        verify.work(machine, "one engine's thread", seconds, request.image_bytes)
    uptake, commit = _uptake(request, host)
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
    """Return the phase of a transport that brings the whole version from rank 0 at a given rate."""
    assert request.rate_gb_s is not None
    return PublicationPhase(
        name="send", seconds=request.sent_bytes / (request.rate_gb_s * GB), limit="the rate of the transport"
    )


def _send(request: PublicationRequest, host: HostFigures) -> tuple[_PhaseLoad, dict[str, float]]:
    """Return the load of the broadcasts of all ranks, which run at the same time, and the bytes that they move."""
    load, part = _PhaseLoad(host), request.sent_bytes / len(request.ranks)
    edges, moved = tree_edges(1 + len(request.engines)), {"network": 0.0, "within machines": 0.0}
    stream = host.stream_gb_s * GB

    def carried(sender: int, receiver: int, num_bytes: float) -> None:
        """Count ``num_bytes`` from one machine to another, or within one."""
        load.carry(sender, receiver, num_bytes)
        moved["within machines" if sender == receiver else "network"] += num_bytes

    ends = Counter(member for edge in edges for member in edge)
    roots = [receiver for sender, receiver in edges if sender == 0]
    for machine in request.ranks:
        load.work(machine, "one rank's connections", ends[0] * part / stream, ends[0] * SOCKET_PASSES * part)
        for member in roots:
            carried(machine, request.engines[member - 1], part)
    # what engines pass on is the same in the group of every rank: counted once, for all bytes together
    for sender, receiver in edges:
        if sender:
            carried(request.engines[sender - 1], request.engines[receiver - 1], request.sent_bytes)
    for member, machine in enumerate(request.engines, 1):
        seconds = ends[member] * part / stream
        load.work(machine, "one engine's connections", seconds, ends[member] * SOCKET_PASSES * request.sent_bytes)
        load.core_s[machine] += (len(request.ranks) - 1) * seconds
    return load, moved


def _uptake(request: PublicationRequest, host: HostFigures) -> tuple[PublicationPhase, PublicationPhase]:
    """Return the phases in which engines bring a verified image to where they compute, and take it into use."""
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
