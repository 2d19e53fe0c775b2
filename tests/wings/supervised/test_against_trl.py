"""The losses and their gradients are those of TRL's trainers and of plain transformers, and so are the weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.clock import RealClock
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore
from headrace.models import load_model
from headrace.wings.supervised.bookkeeping import make_batch
from headrace.wings.supervised.config import DpoConfig, SftConfig, load_tuning
from headrace.wings.supervised.preparing import PreparedTuning, prepare_tuning
from headrace.wings.supervised.session import dpo, sft
from tests.learner.builders import assert_close, gradients
from tests.wings.supervised.material import MARKED, chat_model, conversations, pairs, ratings, settings

STEPS, ROWS, LR = 5, 4, 1e-4
BETAS = {"kto": 0.5, "ipo": 0.2, "dpo": 0.3, "simpo": 2.0, "orpo": 0.4}
GAMMA = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("trl") / "model", MARKED)


def loss_of(name: str) -> dict[str, Any]:
    return {"kind": name, "beta": BETAS[name], **({"gamma": GAMMA} if name == "simpo" else {})}


def rows_of(name: str) -> list[dict[str, Any]]:
    count = STEPS * ROWS
    return {"sft": conversations, "kto": ratings}.get(name, pairs)(count)


def prepared_for(name: str, model: Path, run_dir: Path, /, **sections: Any) -> PreparedTuning:
    run = {"steps": STEPS, "rows_per_step": ROWS}
    tree = settings(model, run_dir, run=run, learner={"lr": LR}, data={"shuffle": False}, **sections)
    if name == "sft":
        return prepare_tuning(load_tuning(SftConfig, tree), data=conversations(STEPS * ROWS))
    return prepare_tuning(load_tuning(DpoConfig, {**tree, "loss": loss_of(name)}), data=rows_of(name))


def learner_of(prepared: PreparedTuning) -> LearnerCore:
    config = prepared.config
    context = LearnerContext(
        temperature=1.0, total_steps=STEPS, model_dir=Path(config.model.path), clock=RealClock()
    )  # fmt: skip
    return LearnerCore(load_model(config.model), config.learner, prepared.objective, context)


def moved(model_dir: Path, directory: Path) -> Path:
    """The same model after some change of its weights, so that it differs from its reference."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(directory)
    return directory


# -- plain transformers, in float64, one sample at a time -------------------------------------------------------------


def log_probs(model: Any, sample: Any) -> Tensor:
    """log π of every token but the first."""
    ids = torch.tensor(sample.ids_T, dtype=torch.int64)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


def answers(model: Any, row: Any) -> list[Tensor]:
    return [log_probs(model, sample)[sample.num_prompt - 1 :] for sample in row]


def plain_sft(model: Any, reference: Any, rows: Any) -> Tensor:
    parts = [log_probs(model, row[0])[torch.tensor(row[0].mask_T[1:])] for row in rows]
    return -torch.cat(parts).mean()


def of_pairs(formula: Callable[[list[Tensor], list[Tensor], Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(model: Any, reference: Any, rows: Any) -> Tensor:
        found = []
        for row in rows:
            with torch.no_grad():
                theirs = answers(reference, row)
            found.append(formula(answers(model, row), theirs, log_probs(model, row[0])))
        return torch.stack(found).mean()

    return loss


def plain_kto(model: Any, reference: Any, rows: Any) -> Tensor:
    """Good and bad answers against the mean log-ratio of each answer to the prompt after its own."""

    def gap(ids: Any, begin: int) -> Tensor:
        tokens = torch.tensor(ids, dtype=torch.int64)
        found = [
            torch.log_softmax(each(input_ids=tokens[None], use_cache=False).logits[0, :-1], -1)
            .gather(1, tokens[1:, None])[begin - 1 :, 0]
            .sum()
            for each in (model, reference)
        ]
        return found[0] - found[1].detach()

    samples = [row[0] for row in rows]
    swapped = [
        [*one.ids_T[: one.num_prompt], *other.ids_T[other.num_prompt :]]
        for one, other in zip(samples, [samples[-1], *samples[:-1]], strict=True)
    ]
    with torch.no_grad():
        gaps = [gap(ids, one.num_prompt) for ids, one in zip(swapped, samples, strict=True)]
        baseline = torch.stack(gaps).mean().clamp(min=0)
    losses = [
        1 - torch.sigmoid(BETAS["kto"] * one.side * (gap(one.ids_T, one.num_prompt) - baseline)) for one in samples
    ]
    return torch.stack(losses).mean()


def log_odds(mean: Tensor) -> Tensor:
    return mean - torch.log1p(-mean.exp())


PLAIN = {
    "sft": plain_sft,
    "kto": plain_kto,
    "dpo": of_pairs(
        lambda our, ref, _: -F.logsigmoid(
            BETAS["dpo"] * ((our[0].sum() - ref[0].sum()) - (our[1].sum() - ref[1].sum()))
        )
    ),
    "ipo": of_pairs(
        lambda our, ref, _: (
            (our[0] - ref[0]).mean() - (our[1] - ref[1]).mean() - 1 / (2 * BETAS["ipo"])
        ).square()
    ),
    "simpo": of_pairs(
        lambda our, _, __: -F.logsigmoid(BETAS["simpo"] * (our[0].mean() - our[1].mean()) - GAMMA)
    ),
    "orpo": of_pairs(
        lambda our, _, whole: (
            -whole.mean() - BETAS["orpo"] * F.logsigmoid(log_odds(our[0].mean()) - log_odds(our[1].mean()))
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("budget", [4096, 80])
@pytest.mark.parametrize("name", PLAIN)
def test_packed_loss_and_gradient_are_those_of_plain_transformers(name, budget, model, tmp_path):
    other = moved(model, tmp_path / "moved")
    learner = {"lr": LR, "tokens_per_microbatch": budget}
    if name in ("dpo", "ipo", "kto"):
        learner["reference"] = {"kind": "frozen", "path": str(model)}
    prepared = prepared_for(name, other, tmp_path / "run")
    config = prepared.config.learner.model_copy(
        update={"tokens_per_microbatch": budget, "reference": load_tuning(
            DpoConfig, {"model": {"path": str(model)}, "learner": learner}
        ).learner.reference}
    )  # fmt: skip
    prepared = PreparedTuning(**{
        field: getattr(prepared, field) for field in prepared.__slots__ if field != "config"
    }, config=prepared.config.model_copy(update={"learner": config}))  # fmt: skip
    core = learner_of(prepared)
    rows = [prepared.rows.rows[row] for row in prepared.schedule.rows(0)]
    batch, _ = make_batch(0, list(enumerate(rows)))
    ours = core.forward_backward(batch)
    double = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
        for path in (other, model)
    ]
    expected = PLAIN[name](*double, rows)
    expected.backward()
    assert ours.metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients(core), {key: each.grad for key, each in double[0].named_parameters()})


# -- TRL --------------------------------------------------------------------------------------------------------------


def trainer_of(name: str, model: Path, out: Path) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    common = {
        "output_dir": str(out), "max_steps": STEPS, "learning_rate": LR, "lr_scheduler_type": "constant",
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "bf16": False, "train_sampling_strategy": "sequential", "gradient_checkpointing": False,
    }  # fmt: skip
    whole = {**common, "per_device_train_batch_size": ROWS}
    policy = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if name == "sft":
        args = trl.SFTConfig(**whole, assistant_only_loss=True)
        rows = Dataset.from_list(conversations(STEPS * ROWS))
        return trl.SFTTrainer(model=policy, args=args, train_dataset=rows, processing_class=tokenizer)
    rows = Dataset.from_list(rows_of(name))
    given = {"model": policy, "train_dataset": rows, "processing_class": tokenizer}
    if name in ("dpo", "ipo"):
        kind = {"dpo": "sigmoid", "ipo": "ipo"}[name]
        return trl.DPOTrainer(args=trl.DPOConfig(**whole, loss_type=[kind], beta=BETAS[name]), **given)
    if name == "kto":
        return trl.KTOTrainer(args=trl.KTOConfig(**whole, beta=BETAS[name]), **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainers are experimental
        if name == "simpo":
            from trl.experimental.cpo import CPOConfig, CPOTrainer

            own = {"loss_type": "simpo", "beta": BETAS[name], "simpo_gamma": GAMMA, "cpo_alpha": 0.0}
            return CPOTrainer(args=CPOConfig(**whole, **own), **given)
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        # its likelihood is a mean over the tokens of all rows of a pass; the paper's is one of each row
        by_row = {**common, "per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS}
        return ORPOTrainer(args=ORPOConfig(**by_row, beta=BETAS[name]), **given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_five_steps_have_the_losses_and_weights_of_trl(name, model, tmp_path):
    prepared = prepared_for(name, model, tmp_path / "run")
    (sft if name == "sft" else dpo)(prepared.config, data=rows_of(name))
    trainer = trainer_of(name, model, tmp_path / "trl")
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ours = [json.loads(line)["metrics"]["loss"] for line in lines]
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    found = load_file(tmp_path / "run" / "checkpoints" / f"step-{STEPS:06}" / "model.safetensors")
    expected = dict(trainer.model.named_parameters())
    begun = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key].detach(), rtol=0, atol=1e-5, msg=key)
        assert (tensor - begun[key]).abs().max() > 1e-5  # the steps have changed it
