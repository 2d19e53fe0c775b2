"""The ranks of one learner, and how they speak with each other.

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
"""What the messages of torch's libraries say where another rank has gone away."""


class Alone:
    """The only rank of a learner in one process. It has nobody to wait for: no method costs anything."""

    leads = True
    rank = share = part = 0

    def __init__(self, device: torch.device) -> None:
        self.config = ParallelConfig()
        self.device = device

    def most(self, number: int) -> int:
        """See :meth:`Ranks.most`; likewise the others."""
        return number

    def sum(self, number: float) -> float:
        return number

    def join_shares(self, column_N: Tensor) -> Tensor:
        return column_N

    def gather(self, words: bytes) -> list[bytes]:
        return [words]

    def gather_parts(self, words: bytes) -> list[bytes]:
        return [words]

    def wait(self) -> None:
        return

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


class Ranks:
    """This process among the ranks of its learner. All of them must call each method, in the same order."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.rank = dist.get_rank()
        shape = (config.num_shares, config.context, config.tensor)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=(SAMPLES, CONTEXT, TENSOR))
        self.share = mesh.get_local_rank(SAMPLES)
        """Whose micro-batches this rank computes."""
        self.part = mesh.get_local_rank(CONTEXT)
        """Which tokens of them."""
        self.context_group = mesh.get_group(CONTEXT)
        self._samples_group = mesh.get_group(SAMPLES)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks with the rest of the run."""
        return self.rank == 0

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return int(_reduced(torch.tensor([number]), dist.ReduceOp.MAX)[0])

    def sum(self, number: float) -> float:
        """The sum of the ranks' numbers; the same bits on every rank."""
        return float(_reduced(torch.tensor([number], dtype=torch.float64), dist.ReduceOp.SUM)[0])

    def join_shares(self, column_N: Tensor) -> Tensor:
        """The sum over the shares of columns of the host's memory in which each token has a value in one share only."""
        dist.all_reduce(column_N, group=self._samples_group)
        return column_N

    def gather(self, words: bytes) -> list[bytes]:
        """What each rank says, in order."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.config.world)]
        dist.all_gather(sizes, torch.tensor([len(words)]))
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(words)] = _tensor(words)
        theirs = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(theirs, mine)
        return [bytes(one[: int(size)].numpy()) for one, size in zip(theirs, sizes, strict=True)]

    def gather_parts(self, words: bytes) -> list[bytes]:
        """What the first rank of each part of each share says, in order."""
        return self.gather(words)[:: self.config.tensor]

    def hear(self, words: bytes | None) -> bytes:
        """What the leading rank says; the others hand in ``None``."""
        size = torch.tensor([0 if words is None else len(words)])
        dist.broadcast(size, src=0)
        said = torch.empty(int(size), dtype=torch.uint8) if words is None else _tensor(words)
        dist.broadcast(said, src=0)
        return bytes(said.numpy())

    def wait(self) -> None:
        """Until every rank is here."""
        self.most(0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what the ranks compute together. Where this rank fails by itself it cannot go on: the others wait for
        its part. Raises :class:`~headrace.base.errors.ComponentDied`, with its rank."""
        try:
            with named_loss(self.rank):
                yield
        except ComponentDied:
            raise
        except Exception as error:  # whatever it is, it must end this process
            said, remedy = f"{type(error).__name__}: {error}", "the traceback is in its log"
            if isinstance(error, HeadraceError):
                said, remedy = error.problem, error.remedy
            raise ComponentDied(
                f"rank {self.rank} of the learner failed while the others computed: {said}", remedy=remedy
            ) from error


AnyRanks = Ranks | Alone
"""What a learner is told of the processes it is spread over."""


@contextmanager
def joined(
    config: ParallelConfig, place: RankPlace, device: torch.device, rendezvous: str = "env://"
) -> Iterator[AnyRanks]:
    """Meet the other ranks at ``rendezvous``, if there are any; let go of them at the end.

    ``rendezvous`` is torch's ``init_method``: ``env://`` under torchrun or Ray, ``file://`` on one machine. Raises
    :class:`~headrace.base.errors.ConfigError` if there are more or fewer ranks than the configuration asks for.
    """
    config.refuse_world(place.world)
    if config.world == 1:
        yield Alone(device)
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
def named_loss(rank: int) -> Iterator[None]:
    """Say in words that another rank went away: :class:`RankLost`."""
    try:
        yield
    except RuntimeError as error:  # torch raises nothing narrower for every backend
        if not isinstance(error, dist.DistError) and not any(words in str(error) for words in LOST):
            raise
        raise RankLost(
            f"rank {rank} of the learner lost another rank: {error}",
            remedy="look at the end of the other ranks' logs; the run resumes from its last snapshot",
        ) from error


def _reduced(tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    dist.all_reduce(tensor, op=how)
    return tensor


def _tensor(words: bytes) -> Tensor:
    return torch.frombuffer(bytearray(words), dtype=torch.uint8) if words else torch.empty(0, dtype=torch.uint8)
