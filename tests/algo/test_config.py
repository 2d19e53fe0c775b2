"""``[algo]``: names, bundles, defaults, what is refused, and that none of it loads torch."""

import subprocess
import sys
import tomllib
from typing import Any

import pytest

from headrace.algo.advantages import AnyAdvantage
from headrace.algo.bundles import BUNDLES
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.algo.registry import classes_by_kind
from headrace.base.config import validate
from headrace.base.errors import ConfigError


def algo(text: str) -> AlgoConfig:
    return validate(AlgoConfig, tomllib.loads(text))


def test_settings_load_without_torch() -> None:
    code = (
        "import headrace.algo, headrace.algo.config, sys; assert 'torch' not in sys.modules; "
        "assert headrace.algo.advantage('grpo', [1, 0], std='none') == [0.5, -0.5]; assert 'torch' not in sys.modules; "
        "headrace.algo.AlgoConfig.model_validate({'bundle': 'gspo'}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_default_is_a_clipped_loss_with_truncated_weights() -> None:
    config = AlgoConfig()
    assert config.loss.kind == "dapo"
    assert [part.kind for part in config.correction] == ["tis"]
    assert config.reduction.kind == "token_mean"
    assert config.corrected


def test_tables_and_names_say_the_same() -> None:
    tables = algo('loss = {kind="gspo"}\ncorrection = [{kind="tis", cap=2.0}]\nreduction = {kind="token_mean"}')
    assert tables == algo('loss = "gspo"\ncorrection = "tis"\nreduction = "token_mean"')
    assert algo('[correction]\nkind = "icepop"\nlow = 0.9').correction[0].low == 0.9  # type: ignore[union-attr]


PAPERS = {
    "grpo": "sequence_mean_token_mean",
    "dr_grpo": "constant",
    "luspo": "sequence_mean_token_sum",
    "dpo": "prompt_mean",
}


@pytest.mark.parametrize(("loss", "reduction"), PAPERS.items())
def test_loss_brings_the_reduction_of_its_paper(loss: str, reduction: str) -> None:
    assert algo(f'loss = "{loss}"').reduction.kind == reduction
    assert algo(f'loss = "{loss}"\nreduction = "token_mean"').reduction.kind == "token_mean"


@pytest.mark.parametrize("loss", ["reinforce", "ipo", "vespo", "topr", "m2po", "ce", "dpo", "ref_kl", "distill"])
def test_loss_that_needs_no_correction_gets_none(loss: str) -> None:
    config = algo(f'loss = "{loss}"')
    assert config.correction == ()
    assert config.corrected


def test_uncorrected_is_known_as_such() -> None:
    assert not algo('correction = "none"').corrected
    assert not algo('correction = ["opsm", "age"]').corrected
    assert algo('correction = ["opsm", "tis"]').corrected
    assert algo('correction = "geometric_rejection"').corrected


@pytest.mark.parametrize("name", BUNDLES)
def test_every_bundle_is_a_complete_corrected_recipe(name: str) -> None:
    config = validate(AlgoConfig, {"bundle": name})
    assert config.corrected
    Objective.build(config)
    assert AlgoConfig.model_validate(config.model_dump(mode="json")) == config


def test_keys_beside_a_bundle_replace_its_own() -> None:
    config = algo('bundle = "dapo"\n[loss]\nclip_high = 0.4\n[reduction]\nkind = "prompt_mean"')
    assert (config.loss.kind, config.loss.clip_high) == ("dapo", 0.4)  # type: ignore[union-attr]
    assert config.reduction.kind == "prompt_mean"
    other = algo('bundle = "rloo"\nloss = "kimi"')
    assert (other.advantage.kind, other.loss.kind, other.correction[0].kind) == ("rloo", "kimi", "tis")


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ('loss = "dappo"', "loss.kind='dappo' does not exist", "did you mean 'd"),
        ('bundle = "grop"', "algo.bundle='grop' does not exist", "did you mean 'grpo'"),
        ('[loss]\nkind = "dapo"\nclip_hihg = 0.3', "clip_hihg is not a setting", "did you mean 'clip_high'"),
        ('[loss]\nkind = "ce"\nkl_coef = 0.3', "kl_coef is not a setting", ""),
        ('[correction]\nkind = "tis"\ncap = -1', "cap=-1", ""),
        ('correction = "tsi"', "'tsi' does not exist", "did you mean 'tis'"),
        ('reduction = "tokenmean"', "'tokenmean' does not exist", "did you mean 'token_mean'"),
        ("[loss]\nclip_high = 0.3", "loss does not say its kind", "set loss.kind"),
        ('loss = "nowhere.py:f"', "there is no file nowhere.py", "give the path"),
        ('[loss]\nkind = "custom"\nref = "nowhere"', "names no function", "my_losses.py:my_loss"),
        ('loss = "reinforce"\ncorrection = "tis"', "twice", "set algo.correction = 'none'"),
        ("[[shaping]]\nkind = 'overlong'\nbuffer = 2", "max_tokens is missing", "set "),
    ],
)
def test_what_cannot_work_is_refused_with_its_remedy(text: str, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        algo(text)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("tree", "columns"),
    [
        ({}, {"log_old", "log_mu"}),
        ({"loss": {"kind": "dapo", "kl_coef": 0.1}}, {"log_old", "log_mu", "log_ref"}),
        ({"loss": {"kind": "dapo", "entropy_coef": 0.1}}, {"log_old", "log_mu", "entropy"}),
        ({"loss": "m2po"}, {"log_mu", "selected"}),
        ({"loss": "ce"}, set()),
        ({"loss": "grpo", "correction": ["tis", "top_entropy"]}, {"log_old", "log_mu", "entropy", "selected"}),
        ({"loss": "dpo"}, {"log_ref", "pairs"}),
    ],
)
def test_objective_says_what_it_reads(tree: dict[str, Any], columns: set[str]) -> None:
    objective = Objective.build(AlgoConfig.model_validate(tree))
    assert objective.columns == columns
    assert objective.selects_tokens == ("selected" in columns)


@pytest.mark.parametrize("correction", [None, "none", "opsm", ["outlier"], "tis", "loglinear", "geometric_rejection"])
def test_engine_as_old_policy_leaves_nothing_to_a_correction(correction: Any) -> None:
    tree = {"old": "engine", "loss": "grpo"} | ({} if correction is None else {"correction": correction})
    if correction in (None, "none", "opsm"):
        config = validate(AlgoConfig, tree)
        assert config.corrected
        assert [part.kind for part in config.correction] == (["opsm"] if correction == "opsm" else [])
        assert Objective.build(config).old == "engine"
        return
    with pytest.raises(ConfigError, match="twice"):
        validate(AlgoConfig, tree)


def test_advantages_say_which_of_them_a_run_cannot_use() -> None:
    assert [name for name, kind in classes_by_kind(AnyAdvantage).items() if kind.stateful] == ["rae"]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"correction": {"kind": "icepop", "low": 5.0, "high": 0.5}}, "low=5.0 and high=0.5"),
        ({"correction": {"kind": "outlier", "low": 200.0}}, "low=200.0"),
        ({"correction": {"kind": "geometric_rejection", "low": 1.5}}, "low=1.5"),
        ({"shaping": [{"kind": "overlong", "max_tokens": 10, "buffer": 20}]}, "buffer=20 above max_tokens=10"),
        ({"loss": {"kind": "grpo", "kl": "k1"}}, "kl='k1' has no effect without kl_coef > 0"),
        ({"loss": {"kind": "grpo", "unbiased_kl": True}}, "unbiased_kl=True has no effect"),
        ({"loss": {"kind": "cispo", "clip_low": 0.5}}, "clip_low=0.5 has no effect without two_sided"),
        ({"loss": {"kind": "distill", "beta": 0.3}}, "beta=0.3 has no effect"),
        ({"loss": "GRPO"}, "'GRPO' does not exist"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(AlgoConfig, tree)
    assert problem in caught.value.problem
    if tree.get("loss") == "GRPO":
        assert "did you mean 'grpo'" in caught.value.remedy
