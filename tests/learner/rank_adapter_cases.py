"""What the ranks of the tests do with adapters; each returns numbers that are compared with those of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.errors import HeadraceError
from headrace.base.types.batch import Batch
from headrace.launch.hosts.learner import PublishedBuffers
from headrace.learner.adapters import Adapters
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.learner.parallel.config import ParallelConfig
from headrace.learner.parallel.load import load_on_ranks, load_sharded
from headrace.learner.parallel.mesh import AnyRanks, Ranks
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.weights import belongs_to_adapter, weight_tensors
from headrace.sync.config import Route
from headrace.sync.transports import make_receiver
from tests.learner.builders import random_batch
from tests.learner.rank_cases import Found, _save
from tests.learner.sharded import Case, ShardedLearner
from tests.learner.test_agents import of_roles

AGENTS = ("proposer", "solver")
TWO: tuple[dict[str, int], ...] = ({"data": 2}, {"replicate": 2}, {"context": 2}, {"tensor": 2})
FOUR: tuple[dict[str, int], ...] = (
    {"data": 4},
    {"data": 2, "replicate": 2},
    {"data": 2, "context": 2},
    {"data": 2, "tensor": 2},
    {"tensor": 2, "context": 2},
)
FLAT = {"tokens_per_microbatch": 30, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
"""An ε at which AdamW does not turn roundings into steps, and a norm to which gradients are clipped."""


def by_roles(step: int) -> Batch:
    """Tokens of three adapters; in the second step, of one."""
    return of_roles(step, "proposer") if step == 1 else of_roles(step, "", *AGENTS)


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """Adapters on a model, and the batches that train them."""

    kind: str = "dense"
    lora: dict[str, Any] = field(default_factory=lambda: {"rank": 4})
    batch: Callable[[int], Batch] = lambda step: random_batch(step=step, num_samples=7)
    layouts: tuple[dict[str, int], ...] = ({"data": 2},)
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the learner beside :data:`FLAT`."""
    apart: float = 1e-5
    """How far weights, by the largest number of each, and norms of gradients may be from those of one process."""

    def start(self, directory: Path, name: str) -> dict[str, Any]:
        """The settings with which all begin at the same adapters, whose B is not 0."""
        return {**self.lora, "adapter": str(directory / f"start of {name}")}


ADAPTED = {
    "policy": Adapted(layouts=TWO),
    "agents": Adapted(lora={"rank": 4, "agents": AGENTS}, batch=by_roles, layouts=({"data": 2}, {"tensor": 2})),
    "aligned": Adapted(
        lora={"rank": 4, "agents": AGENTS},
        batch=lambda step: replace(by_roles(step % 2), step=step),
        layouts=({"data": 2}, {"tensor": 2}),
        config={"alignment": {"low": 0.02}},
        apart=1e-4,  # what a projection leaves of a gradient is small beside its roundings
    ),
    "dora": Adapted(lora={"rank": 4, "use_dora": True}),
    "experts": Adapted(kind="experts", lora={"rank": 2, "experts": True}, layouts=({"data": 2}, {"context": 2})),
    "beside_experts": Adapted(kind="experts", layouts=({"data": 2, "expert": 2}, {"tensor": 2, "expert": 2})),
    # some experts get no token in some steps, and then no update; which token goes where hangs on roundings
    "unused_experts": Adapted(kind="zero_experts", lora={"rank": 2, "experts": True}, apart=1e-3),
    "on_four": Adapted(layouts=FOUR),
}


def five_steps(learner: LearnerCore, adapted: Adapted) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The loss and the gradient's norm of each of five steps, and the gradients of the first."""
    losses = [learner.forward_backward(adapted.batch(0)).metrics["loss"]]
    optimizer = learner._optimizer
    norm = optimizer.norm()
    gradients = {one.name: one.master.grad.clone() for one in optimizer.trained if one.master.grad is not None}
    learner.optim_step()
    metrics = [learner.train(adapted.batch(step)).metrics for step in range(1, 5)]
    pairs = [[losses[0], norm], *([each["loss"], each["grad_norm"]] for each in metrics)]
    return pairs, gradients


def trained(learner: LearnerCore) -> dict[str, Tensor]:
    return {one.name: one.weight.detach().clone() for one in learner._optimizer.trained}


def _adapted(directory: Path, name: str) -> Found:
    adapted, found = ADAPTED[name], []
    expected = {kind: load_file(directory / f"{name}.{kind}") for kind in ("gradients", "weights")}
    for layout in adapted.layouts:
        start = adapted.start(directory, name)
        learner = _learner(directory, layout, start, kind=adapted.kind, own=adapted.config).core
        curve, gradients = five_steps(learner, adapted)
        worst = {"gradients": _apart(gradients, expected["gradients"])}
        worst["weights"] = _apart(trained(learner), expected["weights"])
        found.append({"layout": layout, "curve": curve, **worst})
    return {"found": found}


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[Any]:
    """The tensor that is furthest from what is expected, and by how much of its largest number."""
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items()}
    return list(max(apart.items(), key=lambda pair: pair[1]))


def rounded(directory: Path) -> Found:
    """By layout, how far the gradients over a base of bfloat16 are from those of one process in float32."""
    expected, found = load_file(directory / "policy.gradients"), {}
    for layout in ({"data": 2}, {"tensor": 2}):
        start = ADAPTED["policy"].start(directory, "policy")
        learner = _learner(directory, layout, start, dtype="bfloat16").core
        found[next(iter(layout))] = _apart(five_steps(learner, ADAPTED["policy"])[1], expected)
    return found


def _case(name: str) -> Any:
    return lambda directory: _adapted(directory, name)


for _name in ADAPTED:
    globals()[f"adapted_{_name}"] = _case(_name)


def _learner(directory: Path, parallel: dict[str, int], lora: dict[str, Any], **more: Any) -> ShardedLearner:
    model = directory / more.pop("kind", "dense")
    config = {**FLAT, **more.pop("own", {})}
    return ShardedLearner(Case(model_dir=model, parallel=parallel, config=config, lora=lora, **more))


def fresh(directory: Path) -> Found:
    """Whether new adapters have the bits that one process draws."""
    lora = LoraConfig(rank=4, use_dora=True, agents=AGENTS)
    alone = weight_tensors(load_model(ModelConfig(path=str(directory / "dense"), lora=lora)))
    found = {}
    for layout in TWO:
        own = lora if "tensor" not in layout else lora.model_copy(update={"use_dora": False})
        ranks = Ranks(ParallelConfig(**layout), torch.device("cpu"))
        model = load_sharded(ModelConfig(path=str(directory / "dense"), lora=own), ranks)
        drawn = weight_tensors(model)
        found[str(layout)] = all(torch.equal(one, alone[name]) for name, one in drawn.items()) and len(drawn)
        assert not any(one.requires_grad for name, one in model.named_parameters() if not belongs_to_adapter(name))
    return found


def saved(directory: Path) -> Found:
    """Two steps, a snapshot, two more; and those two again from the snapshot, by the same ranks and by others."""
    start = ADAPTED["policy"].start(directory, "policy")
    learner = _learner(directory, {"data": 2}, start)
    before = [learner.train(_batch(step))["loss"] for step in range(2)]
    place = directory / ("adapter_by_two" if learner.ranks.is_leader else "of the other rank")
    place.mkdir()
    learner.core.save(place)
    after = [learner.train(_batch(step))["loss"] for step in range(2, 4)]
    found: Found = {"losses": before + after}
    for layout in ({"data": 2}, {"tensor": 2}):
        again = _learner(directory, layout, {"rank": 4, "adapter": str(directory / "adapter_by_two")})
        again.core.restore(directory / "adapter_by_two")
        found[f"on {layout}"] = [again.train(_batch(step))["loss"] for step in range(2, 4)]
        found["same bits"] = found.get("same bits", _same(trained(again.core), trained(learner.core)))
    return found


def saved_by_four(directory: Path) -> Found:
    """Two steps on four ranks, and a snapshot."""
    learner = _learner(directory, {"data": 2, "tensor": 2}, ADAPTED["policy"].start(directory, "policy"))
    found = [learner.train(_batch(step))["loss"] for step in range(2)]
    _save(learner, directory / "adapter_by_four")
    return {"losses": found}


def from_four(directory: Path) -> Found:
    """Two steps on two ranks from the snapshot of four."""
    found = {}
    for layout in ({"data": 2}, {"context": 2}):
        learner = _learner(directory, layout, {"rank": 4, "adapter": str(directory / "adapter_by_four")})
        learner.core.restore(directory / "adapter_by_four")
        found[str(layout)] = [learner.train(_batch(step))["loss"] for step in range(2, 4)]
    return found


def _batch(step: int) -> Batch:
    return random_batch(step=step, num_samples=7)


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(one, expected[name]) for name, one in found.items())


def kept_adapters(directory: Path) -> Found:
    """A penalty to the adapter at the beginning, and its file in a snapshot."""
    learner = _learner(directory, {"data": 2}, ADAPTED["policy"].start(directory, "policy"), algo=PENALTY)
    found = [learner.train(_batch(step)) for step in range(2)]
    _save(learner, directory / "penalised_by_two")
    return {"found": [[each["loss"], each["kl_ref"]] for each in found]}


PENALTY = {"loss": {"kind": "grpo", "kl_coef": 0.1}}


def unsaved(directory: Path) -> Found:
    """A directory that the first rank cannot write to: every rank says so, and all go on."""
    learner = _learner(directory, {"data": 2}, {"rank": 4})
    learner.train(_batch(0))
    try:
        learner.core.save(directory / "no such directory")
        said = "saved"
    except HeadraceError as error:
        said = f"{type(error).__name__}: {error.problem}"
    words = [each.decode() for each in learner.ranks.gather(said.encode())]
    return {"said": words, "loss": learner.train(_batch(1))["loss"]}


def published(directory: Path) -> Found:
    """Two ranks publish the adapter with which they begin."""
    return {"update": publish(directory, Ranks(ParallelConfig(data=2), torch.device("cpu")), "two")}


def publish(directory: Path, ranks: AnyRanks, name: str) -> list[Any]:
    """What announces the adapter of the policy to engines; what an engine then holds is written under ``name``."""
    config = ModelConfig(path=str(directory / "dense"), lora=ADAPTED["policy"].start(directory, "policy"))
    route = Route(address=str(directory / f"buffer of {name}"), codec="adapter")
    found: list[Any] = []
    with closing(PublishedBuffers(load_on_ranks(config, ranks), route, ranks)) as buffers:
        buffers.copy(0)
        if buffers.publisher is not None:
            update = buffers.publisher.announce(1, 0)
            engine = weight_tensors(load_model(config.model_copy(update={"lora": LoraConfig(rank=4)})))
            with closing(make_receiver(route, engine)) as receiver:
                receiver.stage(update)
                receiver.commit(1)
                save_file({key: one.detach().clone() for key, one in engine.items()}, directory / f"engine of {name}")
            found = [update.adapter, update.num_bytes, *update.checksums]
        ranks.wait()
    return found


def several_learners(directory: Path) -> Found:
    """Adapters of two learners on one sharded base: each has the loss that it has alone."""
    ranks = Ranks(ParallelConfig(data=2), torch.device("cpu"))
    model = load_on_ranks(ModelConfig(path=str(directory / "dense")), ranks)
    adapters = Adapters(model, str(directory / "dense"), SEVERAL, partial(own_core, directory, ranks), ranks=ranks)
    found: Found = {name: [] for name in SEVERAL}
    for step in range(3):
        for name in SEVERAL:
            with adapters.on(name) as learner:
                found[name].append(learner.train(_batch(step)).metrics["loss"])
    return found


SEVERAL = {"wide": LoraConfig(rank=4, use_dora=True), "narrow": LoraConfig(rank=2, target_modules=["q_proj"])}


def own_core(directory: Path, ranks: AnyRanks | None, name: str, model: Any) -> LearnerCore:
    parallel = {} if ranks is None else {"data": 2}
    return LearnerCore(
        model,
        LearnerConfig.model_validate({"lr": 1e-2, **FLAT, "parallel": parallel}),
        Objective.build(AlgoConfig.model_validate({"bundle": "grpo"})),
        LearnerContext(temperature=1.0, total_steps=10, model_dir=directory / "dense", clock=RealClock()),
        ranks,
    )
