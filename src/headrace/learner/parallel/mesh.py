"""The ranks of one learner, and their communication.

    samples   ranks with different micro-batches             (replicate · data)
    context   ranks with different tokens of the same one
    tensor    ranks with the same tokens and different parts of the matrices

Numbers and bytes of the host travel over Gloo; tensors of the device over the device's own library. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headrace.base.environ import RankPlace
from headrace.base.errors import ComponentDied, HeadraceError, RankLost
from headrace.learner.parallel.config import ParallelConfig

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
SAMPLES, CONTEXT, TENSOR = "samples", "context", "tensor"
LOST = ("onnection closed by peer", "onnection reset by peer", "roken pipe", "Timed out waiting", "gloo/transport")
"""Parts of the messages of torch's libraries that mean that another rank has gone away."""


class SingleRank:
    """The only rank of a learner of one process, in place of :class:`Ranks`. It has no other ranks to communicate with,
    so its methods return at once what they are given."""

    is_leader = True
    rank = share = part = 0
    """The attributes of :class:`Ranks`: the only rank computes the only part of the only share."""

    def __init__(self, device: torch.device) -> None:
        """Make the only rank of a learner that computes on ``device``."""
        self.config = ParallelConfig()
        self.device = device

    def largest(self, number: int) -> int:
        """Return ``number``; see :meth:`Ranks.largest`. The other methods correspond in the same way."""
        return number

    def sum(self, number: float) -> float:
        """Return ``number``, the sum over the only rank."""
        return number

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, the sum over the only rank."""
        return tensor

    def join_shares(self, column_N: Tensor) -> Tensor:
        """Return ``column_N``, which holds the values of all tokens."""
        return column_N

    def gather(self, message: bytes) -> list[bytes]:
        """Return the bytes of the only rank."""
        return [message]

    def gather_parts(self, message: bytes) -> list[bytes]:
        """Return the bytes of the only rank."""
        return [message]

    def broadcast(self, message: bytes | None) -> bytes:
        """Return ``message``, which is that of the only rank."""
        return message or b""

    def wait(self) -> None:
        """Return at once: there is no other rank to wait for."""
        return

    def together(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing: an error travels as it is."""
        return nullcontext()


class Ranks:
    """This process as one of the ranks of its learner. All ranks must call each method, in the same order."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        """Divide the ranks of torch's process group, which must have been joined, as ``config`` says."""
        self.config = config
        self.device = device
        self.rank = dist.get_rank()
        shape = (config.num_shares, config.context, config.tensor)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=(SAMPLES, CONTEXT, TENSOR))
        self.share = mesh.get_local_rank(SAMPLES)
        """Index of the share of the micro-batches that this rank computes."""
        self.part = mesh.get_local_rank(CONTEXT)
        """Index of the part of their tokens that this rank computes."""
        self.context_group = mesh.get_group(CONTEXT)
        self.tensor_group = mesh.get_group(TENSOR)
        self._samples_group = mesh.get_group(SAMPLES)
        self._beside: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        """Return whether this rank communicates with the rest of the run."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        """Return the largest of the numbers with which the ranks call it."""
        return int(_reduced(torch.tensor([number]), dist.ReduceOp.MAX)[0])

    def sum(self, number: float) -> float:
        """Return the sum of the numbers with which the ranks call it, with the same bits on every rank."""
        return float(_reduced(torch.tensor([number], dtype=torch.float64), dist.ReduceOp.SUM)[0])

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors with which the ranks call it, in place and with the same bits on every rank."""
        return _reduced(tensor, dist.ReduceOp.SUM)

    def join_shares(self, column_N: Tensor) -> Tensor:
        """Return the column that the shares make up together: ``column_N`` in host memory, in which each token has a
        value in one share and 0 in the others, summed over the shares, in place."""
        dist.all_reduce(column_N, group=self._samples_group)
        return column_N

    def gather(self, message: bytes) -> list[bytes]:
        """Return the ``message`` of each rank, in order of rank; their lengths may differ."""
        return _gathered(message, self.config.world, None)

    def open_beside(self) -> None:
        """Prepare for :meth:`gather_beside`; a second call does nothing."""
        if self._beside is None:
            self._beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.timeout_s))

    def gather_beside(self, message: bytes) -> list[bytes]:
        """Do what :meth:`gather` does, in one thread of each rank beside the one that calls the other methods: its
        messages cannot be confused with theirs. :meth:`open_beside` must have been called."""
        assert self._beside is not None
        return _gathered(message, self.config.world, self._beside)

    def gather_parts(self, message: bytes) -> list[bytes]:
        """Return the ``message`` of the first tensor-parallel rank of each context part of each share, in order of
        rank."""
        return self.gather(message)[:: self.config.tensor]

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the message of the leading rank, on every rank; the others pass ``None``."""
        size = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(size, src=0)
        received = torch.empty(int(size), dtype=torch.uint8) if message is None else _tensor(message)
        dist.broadcast(received, src=0)
        return bytes(received.numpy())

    def wait(self) -> None:
        """Wait until every rank has called this method."""
        self.largest(0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wrap a computation in which the ranks depend on each other. If this rank fails alone it cannot continue,
        because the others wait for its part. Raises :class:`~headrace.base.errors.ComponentDied` with its rank for any
        error of the block."""
        try:
            with explained_rank_loss(self.rank):
                yield
        except ComponentDied:
            raise
        except Exception as error:  # any error must end this process
            received, remedy = f"{type(error).__name__}: {error}", "the traceback is in its log"
            if isinstance(error, HeadraceError):
                received, remedy = error.problem, error.remedy
            raise ComponentDied(
                f"rank {self.rank} of the learner failed while the others computed: {received}", remedy=remedy
            ) from error


AnyRanks = Ranks | SingleRank
"""The processes over which a learner is spread: several ranks, or one alone."""


@contextmanager
def joined(
    config: ParallelConfig, place: RankPlace, device: torch.device, rendezvous: str = "env://"
) -> Iterator[AnyRanks]:
    """Join the other ranks at ``rendezvous``, if there are any, and yield this process's communication with them; leave
    them at the end of the ``with`` block. ``place`` is the rank of this process and the number of processes that were
    started.

    ``rendezvous`` is torch's ``init_method``: ``env://`` under torchrun or Ray, ``file://`` on one machine. Raises
    :class:`~headrace.base.errors.ConfigError` if the number of ranks differs from the configuration.
    """
    config.refuse_world(place.world)
    if config.world == 1:
        yield SingleRank(device)
        return
    dist.init_process_group(
        BACKENDS[device.type],
        init_method=rendezvous,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=config.timeout_s),
    )
    try:
        yield Ranks(config, device)
    finally:
        dist.destroy_process_group()


@contextmanager
def explained_rank_loss(rank: int) -> Iterator[None]:
    """Turn torch's error about another rank that went away, raised in the ``with`` block of rank ``rank``, into
    :class:`RankLost`."""
    try:
        yield
    except RuntimeError as error:  # torch raises nothing narrower for every backend
        if not isinstance(error, dist.DistError) and not any(words in str(error) for words in LOST):
            raise
        raise RankLost(
            f"rank {rank} of the learner lost another rank: {error}",
            remedy="look at the end of the other ranks' logs; the run resumes from its last snapshot",
        ) from error


def _gathered(message: bytes, world: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the ``message`` of each of the ``world`` ranks, in order of rank, sent over ``group``; ``None`` is the
    group of all communication but that of a thread beside it."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(message)] = _tensor(message)
    theirs = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(theirs, mine, group=group)
    return [bytes(one[: int(size)].numpy()) for one, size in zip(theirs, sizes, strict=True)]


def _reduced(tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    """Return ``tensor`` reduced over all ranks by ``how``, in place."""
    dist.all_reduce(tensor, op=how)
    return tensor


def _tensor(message: bytes) -> Tensor:
    """Return the bytes of a message as a tensor that can be sent to other ranks."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
