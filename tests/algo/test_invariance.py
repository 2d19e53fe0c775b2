"""Every loss × correction × reduction: how a batch is laid out, cut, ordered and spread over ranks changes nothing."""

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from headrace.algo.base import BatchLayout, Correction, LossInputs
from headrace.algo.check import take
from headrace.algo.metrics import add, means
from headrace.algo.objective import Objective
from tests.algo.batches import CORRECTIONS, LOSSES, REDUCTIONS, batch

COMBINATIONS = list(itertools.product(LOSSES, [None, *CORRECTIONS], REDUCTIONS))
EPISODES = [0, 0, 1, 2, 3, 4, 5, 5]
"""Samples of one rollout count once."""
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
"""What reductions see: prompts of unequal size in tokens. Pairs are neighbours."""


def objective(loss: str, correction: str | None, reduction: str) -> Objective:
    corrections: tuple[Correction, ...] = () if correction is None else (CORRECTIONS[correction](),)
    return Objective(LOSSES[loss](), corrections, REDUCTIONS[reduction]())


def layout(inputs: LossInputs, samples: Sequence[int]) -> BatchLayout:
    return BatchLayout(
        mask_N=inputs.mask_N,
        samples_N=inputs.samples_N,
        episodes_S=torch.tensor([EPISODES[s] for s in samples]),
        groups_S=torch.tensor([GROUPS[s] for s in samples]),
    )


def run(what: Objective, inputs: LossInputs, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Loss, gradient of every token (of a teacher's entries too), and metrics that can be added up."""
    assert inputs.log_pi_NK is not None
    leaves = (inputs.log_pi_N.clone().requires_grad_(), inputs.log_pi_NK.clone().requires_grad_())
    out = what(replace(inputs, log_pi_N=leaves[0], log_pi_NK=leaves[1]), weights)
    grads = torch.autograd.grad(out.loss, leaves, allow_unused=True, materialize_grads=True)
    return out.loss.detach(), torch.cat([grads[0][:, None], grads[1]], dim=1), out.metrics


def disturbed(inputs: LossInputs, generator: torch.Generator) -> LossInputs:
    """Observation tokens inserted at random, with garbage in every column, as in any other token outside the mask."""
    spots = torch.randint(len(inputs.mask_N), (9,), generator=generator)
    order = torch.cat([torch.arange(len(inputs.mask_N)), spots]).sort(stable=True).values
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = order[1:] != order[:-1]
    names = [f.name for f in fields(inputs) if f.name.endswith(("_N", "_NK", "_NP"))]
    columns = {name: getattr(inputs, name)[order].clone() for name in names if getattr(inputs, name) is not None}
    columns["mask_N"] &= first
    for column in columns.values():
        if column.is_floating_point():
            column[~columns["mask_N"]] = torch.nan
    return replace(inputs, **columns)


@pytest.mark.parametrize("loss", LOSSES)
def test_layout_order_and_micro_batches_change_nothing(loss: str) -> None:
    generator = torch.Generator().manual_seed(7)
    plain = batch(seed=4, num_samples=8, length=5)
    order = [6, 7, 2, 3, 0, 1, 4, 5]
    moved = disturbed(take(plain, order), generator)
    for correction, reduction in itertools.product([None, *CORRECTIONS], REDUCTIONS):
        what = objective(loss, correction, reduction)
        whole = replace(plain, selected_NP=what.prepare(plain))
        value, grad, metrics = run(what, whole, what.weights(layout(plain, range(8))))
        other = replace(moved, selected_NP=what.prepare(moved))
        weights = what.weights(layout(other, order))
        total, parts, measured = torch.zeros(()), [], []
        for cut in ([0, 1, 2, 3], [4, 5], [6, 7]):
            packed = take(replace(other, versions_N=weights), cut, packed=True).versions_N  # as one more column
            part, part_grad, part_metrics = run(what, take(other, cut, packed=True), packed)
            measured.append(part_metrics)
            total = total + part
            parts.append(part_grad)
        expected = torch.cat([grad[(plain.samples_N == s) & plain.mask_N] for s in order])
        where = f"{loss} × {correction} × {reduction}"
        torch.testing.assert_close(total, value, rtol=1e-5, atol=1e-6, msg=where)
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-7, msg=where)
        expected_means = pytest.approx(means(add([metrics])), rel=1e-6, abs=1e-9)
        assert means(add(measured)) == expected_means, where


def gradients(theta: Tensor, rank: int | None) -> Tensor:
    """For every combination, gradient and loss of a rank's two samples, or of the whole batch."""
    whole, features = batch(seed=4, num_samples=8, length=5), torch.randn(
        40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )  # fmt: skip
    everything = forward(whole, features, theta.detach())
    here_N = torch.ones_like(whole.mask_N) if rank is None else whole.samples_N // 2 == rank
    samples = range(8) if rank is None else (2 * rank, 2 * rank + 1)
    weights = {name: objective("ce", None, name).weights(layout(whole, range(8)))[here_N] for name in REDUCTIONS}
    rows = []
    for loss, correction in itertools.product(LOSSES, [None, *CORRECTIONS]):
        what = objective(loss, correction, "token_mean")
        prepared = replace(whole, selected_NP=what.prepare(everything))
        inputs = forward(take(prepared, samples), features[here_N], theta)
        for reduction in REDUCTIONS:
            value = what(inputs, weights[reduction]).loss
            (grad,) = torch.autograd.grad(value, theta, retain_graph=True)
            rows.append(torch.cat([grad, value.detach()[None]]))
    return torch.stack(rows)


def _rank(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    summed = gradients(policy(), rank)
    dist.all_reduce(summed)
    if rank == 0:
        torch.save(summed, results)
    dist.destroy_process_group()


def policy() -> Tensor:
    """The three weights of a policy that every token depends on."""
    return torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)


def forward(inputs: LossInputs, features: Tensor, theta: Tensor) -> LossInputs:
    log_pi_N = torch.nn.functional.logsigmoid(features @ theta - 1.0)
    assert inputs.log_nu_NK is not None
    return replace(inputs, log_pi_N=log_pi_N, log_pi_NK=inputs.log_nu_NK + 0.1 * log_pi_N[:, None])


@pytest.mark.slow
def test_four_ranks_make_the_gradient_of_one(tmp_path: Path) -> None:
    mp.start_processes(
        _rank, args=(str(tmp_path / "store"), str(tmp_path / "grads.pt")), nprocs=4, start_method="spawn"
    )
    of_ranks = torch.load(tmp_path / "grads.pt", weights_only=True)
    of_one = gradients(policy(), None)
    for names, ours, theirs in zip(COMBINATIONS, of_ranks, of_one, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, msg=" × ".join(map(str, names)))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_parts_of_a_batch_stream_in_before_it_is_complete(reduction: str) -> None:
    what = objective("dapo", "tis", reduction)
    whole = batch(seed=4, num_samples=8, length=5)
    value, grad, _ = run(what, whole, what.weights(layout(whole, range(8))))
    total, mass, parts = torch.zeros(()), torch.zeros(()), []
    for samples in (range(4), range(4, 8)):
        part = take(whole, samples)
        shares = what.shares(layout(part, samples))
        part_value, part_grad, _ = run(what, part, shares.weights_N)
        total, mass = total + part_value, mass + shares.mass
        parts.append(part_grad)
    torch.testing.assert_close(total / mass, value, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.cat(parts) / mass, grad, rtol=1e-6, atol=1e-7)


def test_mean_of_micro_batch_means_would_be_another_number() -> None:
    """The trap that the weights of the whole batch are there for."""
    what = objective("ce", None, "token_mean")
    whole = batch(seed=4, num_samples=8, length=5)
    cut = [take(whole, samples) for samples in (range(2), range(2, 8))]
    of_parts = [run(what, part, what.weights(layout(part, range(part.num_samples))))[0] for part in cut]
    value, _, _ = run(what, whole, what.weights(layout(whole, range(8))))
    assert abs(float(sum(of_parts) / 2 - value)) > 1e-3


def test_samples_of_one_rollout_count_once() -> None:
    whole = batch(seed=4, num_samples=8, length=5)
    what = objective("ce", None, "sequence_mean_token_mean")
    weights = what.weights(layout(whole, range(8)))
    per_rollout = torch.zeros(6).index_add(0, torch.tensor(EPISODES)[whole.samples_N], weights)
    torch.testing.assert_close(per_rollout, torch.full((6,), 1 / 6))
