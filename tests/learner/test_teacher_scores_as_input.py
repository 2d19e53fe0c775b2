"""A teacher that has spoken before the batch was made is learned from as one that the learner computes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.versions import FROZEN
from tests.learner import reference
from tests.learner.builders import Setup, gradients, random_batch, tiny

K = 5
TEMPERATURE = 0.8
DISTIL = {"loss": {"kind": "distill", "divergence": "forward"}}
CREDIT = {"loss": "grpo", "advantage": {"kind": "reverse_kl", "beta": 0.5}}
SERVED = {"kind": "frozen", "engine": {}}


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("teacher") / "model", hidden_size=48, num_layers=3, seed=3)


def lessons(batch: Batch, teacher_dir, version: int = FROZEN) -> TeacherScores:
    """What the teacher says of the tokens that carry loss, in float64."""
    model, parts = reference.double(teacher_dir), []
    for part in reference.samples(batch):
        with torch.no_grad():
            logs_TV = reference.log_softmax(model, batch, part, TEMPERATURE)
        ids = torch.tensor(batch.ids_N[part], dtype=torch.int64)[1:]
        best = logs_TV.topk(K)
        said = TeacherScores(
            logprobs_T=logs_TV.gather(1, ids[:, None])[:, 0].numpy().astype(np.float32),
            versions_T=np.full(len(ids), version, np.int32),
            ids_TK=best.indices.numpy().astype(np.int32),
            logs_TK=best.values.numpy().astype(np.float32),
        )
        parts += [TeacherScores.none(1, K), said]
    return TeacherScores.concat(parts)


@pytest.mark.parametrize("algo", [DISTIL, CREDIT], ids=["entries", "credit"])
def test_what_came_with_the_batch_gives_the_gradient_of_a_teacher_beside_the_learner(model_dir, teacher_dir, algo):
    batch = random_batch(0)
    beside = {"teachers": [{"kind": "model", "path": str(teacher_dir)}], "top_k": K}
    expected = Setup(model_dir=model_dir, temperature=TEMPERATURE, algo=algo, config=beside).learner()
    wanted = expected.forward_backward(batch).metrics
    told = Setup(model_dir=model_dir, temperature=TEMPERATURE, algo=algo, config={"teachers": [SERVED], "top_k": K})
    learner = told.learner()
    found = learner.forward_backward(msgspec.structs.replace(batch, teacher_scores=lessons(batch, teacher_dir))).metrics
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found.get("kl_teacher", 0.0) == pytest.approx(wanted.get("kl_teacher", 0.0), rel=1e-5)
    for name, gradient in gradients(learner).items():
        other = gradients(expected)[name]
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def test_the_learner_keeps_no_copy_of_a_teacher_that_is_elsewhere(model_dir, tmp_path):
    learner = Setup(model_dir=model_dir, algo=DISTIL, config={"teachers": [SERVED]}).learner()
    learner.save(tmp_path)
    assert not list(tmp_path.glob("teacher*"))
    assert not learner.swaps_weights


def test_the_version_of_a_teacher_is_told_where_it_is_one_of_the_run(model_dir, teacher_dir):
    batch = random_batch(0)
    setup = Setup(model_dir=model_dir, temperature=TEMPERATURE, algo=DISTIL, config={"teachers": [SERVED], "top_k": K})
    dated = msgspec.structs.replace(batch, teacher_scores=lessons(batch, teacher_dir, version=0))
    assert setup.learner().forward_backward(dated).metrics["teacher_version"] == 0
    undated = msgspec.structs.replace(batch, teacher_scores=lessons(batch, teacher_dir))
    assert "teacher_version" not in setup.learner().forward_backward(undated).metrics


@pytest.mark.parametrize("missing", ["all", "one token", "its entries"])
def test_a_batch_without_what_a_teacher_says_is_refused(model_dir, teacher_dir, missing):
    batch, taught = random_batch(0), None
    if missing != "all":
        taught = lessons(batch, teacher_dir)
        lost = int(np.flatnonzero(batch.mask_N)[2])
        taught = taught[:lost] + TeacherScores.none(1, K) + taught[lost + 1 :]
    if missing == "its entries":
        whole = lessons(batch, teacher_dir)
        taught = msgspec.structs.replace(whole, ids_TK=whole.ids_TK[:, :0], logs_TK=whole.logs_TK[:, :0])
    learner = Setup(model_dir=model_dir, algo=DISTIL, config={"teachers": [SERVED], "top_k": K}).learner()
    with pytest.raises(RunError, match="come without what they say"):
        learner.forward_backward(msgspec.structs.replace(batch, teacher_scores=taught))
    assert not learner.has_gradient


def test_entries_that_the_model_does_not_have_are_refused(model_dir, teacher_dir):
    batch = random_batch(0)
    taught = lessons(batch, teacher_dir)
    other = msgspec.structs.replace(taught, ids_TK=taught.ids_TK + 1000)
    learner = Setup(model_dir=model_dir, algo=DISTIL, config={"teachers": [SERVED], "top_k": K}).learner()
    with pytest.raises(RunError, match="a teacher's entry is 1"):
        learner.forward_backward(msgspec.structs.replace(batch, teacher_scores=other))
