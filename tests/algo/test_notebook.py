"""The face for notebooks: shapes, stand-ins, and everything that is refused."""

from typing import Any

import pytest
import torch

from headrace import algo
from headrace.algo.corrections import Tis
from headrace.base.errors import ConfigError, DataError

LOG_PI = torch.tensor([[-0.5, -1.0, -2.0], [-0.3, -0.8, -1.5]])
OLD = LOG_PI + torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.4, -0.1]])
MU = OLD - 0.3
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
GIVEN: dict[str, Any] = {"log_pi": LOG_PI, "log_old": OLD, "advantages": [1.0, -1.0], "mask": MASK}


def test_advantages_may_be_by_sequence_or_by_token() -> None:
    value = algo.loss("grpo", **GIVEN).loss
    for advantages in ([[1.0], [-1.0]], [[1.0] * 3, [-1.0] * 3], torch.tensor([1.0, -1.0])):
        assert algo.loss("grpo", **{**GIVEN, "advantages": advantages}).loss == value


def test_single_sequence_needs_no_batch_dimension() -> None:
    one = {"log_pi": LOG_PI[1], "log_old": OLD[1], "mask": MASK[1]}
    two = {"log_pi": LOG_PI[1:], "log_old": OLD[1:], "mask": MASK[1:]}
    flat = algo.loss("dapo", **one, advantages=[0.5, -0.5, 1.0])
    assert flat.loss == algo.loss("dapo", **two, advantages=[[0.5, -0.5, 1.0]]).loss
    assert flat.tokens.shape == (3,)


def test_tokens_have_the_shape_of_the_inputs_and_no_gradient() -> None:
    out = algo.loss("dapo", **{**GIVEN, "log_pi": LOG_PI.clone().requires_grad_()})
    assert out.tokens.shape == (2, 3)
    assert not out.tokens.requires_grad
    assert out.tokens[0, 2] == 0
    assert out.loss.requires_grad


def test_half_precision_is_computed_in_single() -> None:
    half = {key: value.bfloat16() for key, value in GIVEN.items() if key in ("log_pi", "log_old")}
    out = algo.loss("dapo", **{**GIVEN, **half})
    assert out.loss.dtype == torch.float32
    wide = {key: value.float() for key, value in half.items()}
    torch.testing.assert_close(out.loss, algo.loss("dapo", **{**GIVEN, **wide}).loss)


def test_old_policy_stands_in_for_the_sampling_one_but_not_for_a_correction() -> None:
    left_out = algo.loss("reinforce", **GIVEN)
    assert left_out.loss == algo.loss("reinforce", **GIVEN, log_mu=OLD).loss
    with pytest.raises(ConfigError, match="log_mu is missing"):
        algo.loss("grpo", **GIVEN, correction="tis")


def test_correction_may_be_a_name_a_table_or_a_record() -> None:
    outs = [
        algo.loss("grpo", **GIVEN, log_mu=MU, correction=choice, **options)
        for choice, options in (("tis", {"cap": 1.2}), ({"kind": "tis", "cap": 1.2}, {}), (Tis(cap=1.2), {}))
    ]
    assert len({float(out.loss) for out in outs}) == 1
    assert float(outs[0].loss) != float(algo.loss("grpo", **GIVEN, log_mu=MU, correction="none").loss)


def test_options_find_their_formula() -> None:
    by_name = algo.loss("dr_grpo", **GIVEN, log_mu=MU, clip_high=0.1, cap=1.1, normalizer=5, correction="tis")
    by_table = algo.loss(
        "dr_grpo", **GIVEN, log_mu=MU, clip_high=0.1, correction={"kind": "tis", "cap": 1.1},
        reduction={"kind": "constant", "normalizer": 5},
    )  # fmt: skip
    assert by_name.loss == by_table.loss


def test_groups_decide_the_prompt_mean() -> None:
    values = {"log_pi": -torch.tensor([[1.0, 2.0], [3.0, 9.0]]), "mask": [[1, 1], [1, 0]], "advantages": [0, 0]}
    assert algo.loss("ce", **values, reduction="prompt_mean").loss == pytest.approx(2.0)
    assert algo.loss("ce", **values, reduction="prompt_mean", groups=[5, 9]).loss == pytest.approx(2.25)


def test_dpo_pairs_neighbours_unless_told() -> None:
    log_pi = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) - 2
    ref, mask = torch.full((4, 3), -2.0), torch.ones(4, 3)
    plain = algo.loss("dpo", log_pi=log_pi, log_ref=ref, mask=mask, advantages=[1, -1, 1, -1])
    order = [0, 2, 1, 3]
    told = algo.loss(
        "dpo", log_pi=log_pi[order], log_ref=ref, mask=mask, advantages=[1, 1, -1, -1], groups=[7, 8, 7, 8]
    )
    torch.testing.assert_close(told.loss, plain.loss)
    with pytest.raises(DataError, match="exactly one chosen"):
        algo.loss("dpo", log_pi=log_pi, log_ref=ref, mask=mask, advantages=[1, 1, -1, -1])


def test_every_loss_runs_from_a_notebook() -> None:
    names = (
        "grpo dapo dr_grpo luspo gspo gspo_token gmpo cispo sapo vespo reinforce topr kimi dro dppo ipo m2po clip_cov "
        "kl_cov aspo ce ref_kl dpo"
    )
    for name in names.split():
        log_pi = LOG_PI.clone().requires_grad_()
        out = algo.loss(name, **{**GIVEN, "log_pi": log_pi}, log_mu=MU, log_ref=MU)
        out.loss.backward()
        assert log_pi.grad is not None
        assert log_pi.grad.isfinite().all(), name
        assert log_pi.grad[0, 2] == 0, name


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        ({"name": "gsppo"}, "loss 'gsppo' does not exist", "did you mean 'gspo'"),
        ({"name": "grpo", "clip_hi": 0.3}, "grpo with sequence_mean_token_mean has no option 'clip_hi'", "'clip_high'"),
        ({"name": "ce", "clip_low": 0.3}, "has no option 'clip_low'", ""),
        ({"name": "reinforce", "dual_clip": 3}, "has no option 'dual_clip'", ""),
        ({"name": "grpo", "log_old": None}, "log_old is missing", "give log_old"),
        ({"name": "cispo", "log_old": None, "anchor": "mu"}, "log_mu is missing", "give log_mu"),
        ({"name": "grpo", "kl_coef": 0.1}, "log_ref is missing", "give log_ref"),
        ({"name": "grpo", "entropy_coef": 0.1}, "entropy is missing", "give entropy"),
        ({"name": "grpo", "log_mu": MU, "correction": "loglinear"}, "versions is missing", "give versions"),
        ({"name": "grpo", "versions": MASK}, "go together", "give both"),
        ({"name": "cispo", "anchor": "mu", "correction": "tis", "log_mu": MU}, "twice", "keep one"),
        ({"name": "grpo", "reduction": "mean"}, "reduction 'mean' does not exist", "token_mean"),
        ({"name": "grpo", "correction": "tiss"}, "correction 'tiss' does not exist", "did you mean 'tis'"),
        ({"name": "grpo", "log_old": OLD[:, :2]}, "log_old has shape (2, 2)", "that shape"),
        ({"name": "grpo", "advantages": [1.0, 2.0, 3.0]}, "advantages has shape", "that shape"),
        ({"name": "grpo", "groups": [1]}, "groups has 1 rows", "one per sequence"),
        ({"name": "grpo", "clip_low": 2.0}, "clip_low=2.0", ""),
        ({"name": "distill"}, "'top_k'", "teacher"),
        ({"name": None}, "loss None is not a name", "name one of"),
        ({"name": "GRPO"}, "'GRPO' does not exist", "did you mean 'grpo'"),
        ({"name": "grpo", "correction": 3}, "correction 3 is not a name", "give a name"),
        ({"name": "grpo", "correction": [None]}, "correction None is not a name", "name one of"),
        ({"name": "grpo", "advantages": None}, "advantages is missing", "give advantages"),
        ({"name": "ce", "mask": None}, "mask is missing", "give mask"),
        ({"name": "ce", "mask": [[0.5] * 3] * 2}, "mask has entries other than 0 and 1", "give 1"),
        ({"name": "ce", "mask": [[1, 1], [1]]}, "mask is not a table of numbers", "give mask"),
        ({"name": "ce", "log_pi": torch.zeros(2, 2, 2)}, "log_pi has shape (2, 2, 2)", "[B, T]"),
        ({"name": "ce", "log_pi": "no"}, "log_pi is not a table of numbers", "give log_pi"),
        (
            {"name": "ipo", "correction": "opsm", "delta": 0.3, "log_mu": MU},
            "'delta' may be meant for loss 'ipo' and correction 'opsm'",
            "as a table",
        ),
        (
            {"name": "grpo", "correction": {"kind": "tis", "cap": 3.0}, "cap": 2.0, "log_mu": MU},
            "'cap' is given twice: by itself, and for correction 'tis'",
            "give it once",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_remedy(arguments: dict[str, Any], problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        algo.loss(**{**GIVEN, **arguments})
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_unknown_divergence_is_refused() -> None:
    for name in ("k4", None):
        with pytest.raises(ConfigError, match=f"kl {name!r} does not exist"):
            algo.kl(name, LOG_PI, OLD)  # type: ignore[arg-type]


def test_option_goes_where_no_table_sets_it() -> None:
    table = {"kind": "opsm", "delta": 0.5}
    out = algo.loss("ipo", **GIVEN, log_mu=MU, correction=table, delta=0.02)
    alone = algo.loss("ipo", **GIVEN, log_mu=MU, correction={"kind": "opsm", "delta": 0.5})
    assert out.loss != alone.loss


def test_lists_and_arrays_are_columns_too() -> None:
    lists = {key: torch.as_tensor(value).tolist() for key, value in GIVEN.items()}
    arrays = {key: torch.as_tensor(value).numpy() for key, value in GIVEN.items()}
    expected = algo.loss("grpo", **GIVEN).loss
    assert algo.loss("grpo", **lists).loss == algo.loss("grpo", **arrays).loss == expected
    assert algo.kl("k1", [-1.0], [-2.0]).tolist() == [1.0]


@pytest.mark.parametrize("groups", [[-1, 10**9], ["a", None], [("x", 1), 2], torch.tensor([5, 3])])
def test_groups_are_labels_of_any_kind(groups: Any) -> None:
    plain = algo.loss("grpo", **GIVEN, groups=[0, 1], reduction="prompt_mean").loss
    assert algo.loss("grpo", **GIVEN, groups=groups, reduction="prompt_mean").loss == plain


def test_columns_are_not_rounded_to_half_precision() -> None:
    half = {"log_pi": torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16), "mask": [[1, 1]], "advantages": [1 / 3]}
    wide = {**half, "log_pi": half["log_pi"].float()}  # type: ignore[union-attr]
    old = torch.tensor([[-1.003, -2.003]])
    assert torch.equal(algo.loss("grpo", **half, log_old=old).tokens, algo.loss("grpo", **wide, log_old=old).tokens)
