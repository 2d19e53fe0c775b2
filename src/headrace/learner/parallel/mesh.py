"""The ranks of one learner and their communication, as a mesh of three dimensions:

    samples   ranks with different micro-batches             (replicate · data)
    context   ranks with different tokens of the same micro-batch
    tensor    ranks with the same tokens and different parts of the matrices

Numbers and bytes in host memory are sent by Gloo; tensors of a GPU by NCCL. Nothing is pickled.
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
"""Parts of error messages of torch's libraries which mean that another rank has ended."""


class SingleRank:
    """The interface of :class:`Ranks` for a learner of one process. Its methods return their arguments without
    communication."""

    is_leader = True
    rank = share = part = 0
    """The attributes of :class:`Ranks`: a single rank computes the single part of the single share."""

    def __init__(self, device: torch.device) -> None:
        """Create the single rank of a learner that computes on ``device``."""
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
        """Return ``column_N``, which has the values of all tokens already."""
        return column_N

    def gather(self, message: bytes) -> list[bytes]:
        """Return the bytes of the only rank."""
        return [message]

    def gather_parts(self, message: bytes) -> list[bytes]:
        """Return the bytes of the only rank."""
        return [message]

    def broadcast(self, message: bytes | None) -> bytes:
        """Return ``message``, the message of the single rank."""
        return message or b""

    def wait(self) -> None:
        """Return at once: there is no other rank to wait for."""
        return

    def together(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: errors are raised unchanged."""
        return nullcontext()


class Ranks:
    """This process as one of the ranks of its learner. All ranks must call each method, in the same order."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        """Arrange the ranks of torch's process group, which must have been joined and compute on ``device``, in the
        mesh that ``config`` describes."""
        self.config = config
        self.device = device
        self.rank = dist.get_rank()
        shape = (config.num_shares, config.context, config.tensor)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=(SAMPLES, CONTEXT, TENSOR))
        self.share = mesh.get_local_rank(SAMPLES)
        """The index of the share of the micro-batches that this rank computes."""
        self.part = mesh.get_local_rank(CONTEXT)
        """The index of the part of their tokens that this rank computes."""
        self.context_group = mesh.get_group(CONTEXT)
        self.tensor_group = mesh.get_group(TENSOR)
        self._samples_group = mesh.get_group(SAMPLES)
        """The group of the ranks that compute different samples."""
        self._beside: dist.ProcessGroup | None = None
        """The process group of :meth:`gather_beside`; ``None`` before :meth:`open_beside`."""

    @property
    def is_leader(self) -> bool:
        """Return whether this rank communicates with the rest of the run."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        """Return the maximum of ``number`` over the ranks."""
        return int(_reduce(torch.tensor([number]), dist.ReduceOp.MAX)[0])

    def sum(self, number: float) -> float:
        """Return the sum of ``number`` over the ranks, with the same bits on every rank."""
        return float(_reduce(torch.tensor([number], dtype=torch.float64), dist.ReduceOp.SUM)[0])

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place and with the same bits on every rank, and return it."""
        return _reduce(tensor, dist.ReduceOp.SUM)

    def join_shares(self, column_N: Tensor) -> Tensor:
        """Sum ``column_N``, in host memory, over the shares, in place, and return it. Each token has a value in one
        share and 0 in all others, so the sum is the whole column."""
        dist.all_reduce(column_N, group=self._samples_group)
        return column_N

    def gather(self, message: bytes) -> list[bytes]:
        """Return the ``message`` of each rank, in the order of the ranks; the lengths may differ."""
        return _gather_messages(message, self.config.world, None)

    def open_beside(self) -> None:
        """Prepare for :meth:`gather_beside`; a second call does nothing."""
        if self._beside is None:
            self._beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.timeout_s))

    def gather_beside(self, message: bytes) -> list[bytes]:
        """Return the ``message`` of each rank like :meth:`gather`, but over a process group of its own, so that one
        further thread of each rank can call it while the main thread calls the other methods. :meth:`open_beside` must
        have been called."""
        assert self._beside is not None
        return _gather_messages(message, self.config.world, self._beside)

    def gather_parts(self, message: bytes) -> list[bytes]:
        """Return the ``message`` of the first tensor-parallel rank of each part of each share, in the order of the
        ranks."""
        return self.gather(message)[:: self.config.tensor]

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the message of rank 0 on every rank; all other ranks pass ``None``."""
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
        """Return a context for a computation in which the ranks communicate. Any error in it becomes a
        :class:`~headrace.base.errors.ComponentDied` that names this rank, because a rank that has failed alone cannot
        continue: the other ranks wait for its part."""
        try:
            with explained_rank_loss(self.rank):
                yield
        except ComponentDied:
            raise
        except Exception as error:  # every error must end this process
            received, remedy = f"{type(error).__name__}: {error}", "the traceback is in its log"
            if isinstance(error, HeadraceError):
                received, remedy = error.problem, error.remedy
            raise ComponentDied(
                f"rank {self.rank} of the learner failed while the others computed: {received}", remedy=remedy
            ) from error


AnyRanks = Ranks | SingleRank
"""The processes of a learner: several ranks, or a single one."""


@contextmanager
def join_ranks(
    config: ParallelConfig, place: RankPlace, device: torch.device, rendezvous: str = "env://"
) -> Iterator[AnyRanks]:
    """Return a context that joins the other ranks at ``rendezvous``, if there are any, yields the communication with
    them, and leaves them at its end. ``place`` is the rank of this process and the number of processes that were
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
    """Return a context on rank ``rank`` that converts torch's errors about the end of another rank into
    :class:`~headrace.base.errors.RankLost`."""
    try:
        yield
    except RuntimeError as error:  # torch raises nothing narrower for every backend
        if not isinstance(error, dist.DistError) and not any(words in str(error) for words in LOST):
            raise
        raise RankLost(
            f"rank {rank} of the learner lost another rank: {error}",
            remedy="look at the end of the other ranks' logs; the run resumes from its last snapshot",
        ) from error


def _gather_messages(message: bytes, world: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the ``message`` of each of the ``world`` ranks, in the order of the ranks, gathered over ``group``;
    ``None``: torch's default process group."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(message)] = _tensor(message)
    theirs = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(theirs, mine, group=group)
    return [bytes(one[: int(size)].numpy()) for one, size in zip(theirs, sizes, strict=True)]


def _reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce ``tensor`` over all ranks by ``operation``, in place, and return it."""
    dist.all_reduce(tensor, op=operation)
    return tensor


def _tensor(message: bytes) -> Tensor:
    """Return the bytes of a message as a tensor that can be sent to other ranks."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
