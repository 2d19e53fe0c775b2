"""The whole run file: what is refused, and what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.run.rules.settings import find_idle_clip
from headrace.run.session import RunConfig, load_config

MODEL = {"model": {"path": "m"}}


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        load_config(MODEL, overrides)
    return refused.value


@pytest.mark.parametrize(
    ("override", "name", "nearest"),
    [
        ("lerner.lr=1", "lerner", "learner"),
        ("learner.rl=1", "learner.rl", "lr"),
        ("flow.max_ages=1", "flow.max_ages", "max_age"),
        ("algo.advantag=1", "algo.advantag", "advantage"),
        ("algo.loss={kind='grpo', clip_hihg=1}", "algo.loss.clip_hihg", "clip_high"),
        ("algo.advantage={kind='grpo', sdt=1}", "algo.advantage.sdt", "std"),
        ("algo.correction={kind='tis', capp=1}", "algo.correction[0].capp", "cap"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(override: str, name: str, nearest: str) -> None:
    error = refusal(override)
    assert error.problem == f"{name} is not a setting"
    assert error.remedy.startswith(f"did you mean '{nearest}'? (known: ")


def test_only_the_keys_of_the_chosen_kind_are_offered() -> None:
    error = refusal("algo.loss={kind='ce', kl_coef=1}")
    assert error.problem == "algo.loss.kl_coef is not a setting"
    assert error.remedy == "known: kind"


@pytest.mark.parametrize("override", ["algo.loss=grppo", "algo.loss.kind=grppo"])
def test_an_unknown_kind_is_refused_with_the_nearest_one(override: str) -> None:
    error = refusal(override)
    assert error.problem == "algo.loss.kind='grppo' does not exist"
    assert "did you mean 'grpo'?" in error.remedy


@pytest.mark.parametrize(
    ("override", "problem", "remedy"),
    [
        ("learner=3", "learner=3 is not a table", r"write \[learner\]"),
        ("run.dir=12", "run.dir=12 is not text", r'run\.dir = "12"'),
        ("learner.lr=fast", "learner.lr='fast': .*valid number", "learner.lr"),
        ("learner.lr=nan", "learner.lr=nan: .*finite", "learner.lr"),
        ("learner.lr=-1", "learner.lr=-1: .*greater than or equal to 0", "learner.lr"),
        ("learner.betas=[0.9]", r"learner\.betas\[1\] is missing", "learner.betas"),
        ("run.steps=1.5", "run.steps=1.5: .*integer", "run.steps"),
        ("model.dtype=int8", "model.dtype='int8': .*'float32' or 'bfloat16'", "model.dtype"),
        (
            "algo.loss.clip_high=1",
            "algo.loss does not say its kind",
            "set algo.loss.kind = 'dapo' too, which is the default, or",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_name_value_and_reason(
    override: str, problem: str, remedy: str
) -> None:
    error = refusal(override)
    with pytest.raises(ConfigError, match=problem):
        raise error
    with pytest.raises(ConfigError, match=f"remedy: .*{remedy}"):
        raise error


def test_every_wrong_key_is_told_at_once() -> None:
    error = refusal("learner.rl=1", "flow.max_age=-1")
    assert "learner.rl" in error.problem
    assert "flow.max_age=-1" in error.problem


@pytest.mark.parametrize("tree", [{}, {"model": {}}])
def test_a_run_file_without_a_model_says_which_key_is_missing(tree: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"remedy: set model\.path$"):
        load_config(tree)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["algo.correction=none"], "flow.max_age=1 trains tokens of older weights"),
        (["flow.max_age=1", "flow.lead=2"], "flow.lead=2 is more than flow.max_age=1"),
        (["flow.capacity=8"], r"flow.capacity=8 is smaller than one batch \(flow.groups_per_step=16\)"),
        (["flow.min_episodes=9"], "flow.min_episodes=9 is more than flow.group_size=8"),
        (["algo.loss='dpo'"], "algo.loss='dpo' learns from pairs of answers, one preferred to the other"),
        (["algo.bundle='dpo'"], "algo.bundle='dpo' learns from pairs of answers"),
        (["algo.loss='ce'"], "algo.loss='ce' would teach the model its own answers, right and wrong alike"),
        (["algo.bundle='sft'"], "algo.bundle='sft' would teach the model its own answers"),
        (["algo.loss='ref_kl'"], "algo.loss='ref_kl' is nothing but the distance from the reference"),
        (["algo.loss='ref_kl'", "learner.reference={kind='ema'}"], "which is this model's own past"),
        (["algo.loss='distill'"], "algo.loss='distill' learns from a teacher, and there is none"),
        (["learner.teachers=[{kind='ema'}]"], r"learner.teachers \(kind 'ema'\) has no effect"),
        (
            ["algo.loss='distill'", "learner.teachers=[{kind='ema'}, {kind='frozen', engine={name='a'}}]"],
            "the one of kind 'ema' has no engine",
        ),
        (
            ["algo.loss='distill'", "learner.teachers=[{kind='frozen', engine={}}, {kind='frozen', engine={}}]"],
            r"could not tell them apart by the names \[''\]",
        ),
        (
            ["algo.loss='distill'", "learner.teachers=[{kind='ema'}]", "learner.teacher_column='subject'"],
            "learner.teacher_column='subject' has no effect",
        ),
        (
            ["algo.loss='distill'", "learner.teachers=[{kind='frozen', engine={prompt='{prompt} {'}}]"],
            "engine.prompt cannot be filled in",
        ),
        (["algo.old='kept'"], "algo.old='kept', and learner.old does not say which weights"),
        (["learner.old.kind='ema'"], "learner.old.kind='ema' has no effect with algo.old='engine'"),
        (["learner.memory.masters=false"], "learner.memory.masters=false has no effect"),
        (["algo.advantage=remax"], "algo.advantage='remax' does not fit env.kind='single_turn'"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        raise refusal(*overrides)


def test_settings_that_just_work_together_are_accepted() -> None:
    load_config(MODEL, ["algo.correction=none", "flow.max_age=0"])
    load_config(MODEL, ["algo.correction=none", "algo.allow_uncorrected=true"])
    load_config(MODEL, ["flow.max_age=2", "flow.lead=2"])
    load_config(MODEL, ["algo.loss='ref_kl'", "learner.reference={kind='model', path='other'}"])
    load_config(MODEL, ["learner.memory.masters=false", "model.dtype=bfloat16"])
    load_config(MODEL, ["flow.capacity=16", "flow.min_episodes=8"])


def test_overrides_win_over_the_file_and_the_last_one_over_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[learner]\nlr = 1e-3\nwarmup_steps = 3\n')
    config = load_config(path, ["learner.lr=1e-4", "learner.lr=1e-5"])
    assert (config.learner.lr, config.learner.warmup_steps) == (1e-5, 3)


def test_overrides_change_the_table_whose_kind_the_file_names_in_one_word(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[algo]\nloss = "grpo"\n')
    loss = load_config(path, ["algo.loss.clip_high=0.5"]).algo.loss
    assert (loss.kind, loss.model_dump()["clip_high"]) == ("grpo", 0.5)


def test_paths_in_a_run_file_are_relative_to_it_and_others_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    path = there / "run.toml"
    path.write_text(
        '[model]\npath = "m"\n[data]\npath = "/rows.jsonl"\neval_path = "../e.csv"\n[env]\nreward = "r.py:f"\n'
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("there/run.toml", ["run.dir=out"])
    assert config.model.path == str(there / "m")
    assert config.data.path == "/rows.jsonl"
    assert Path(config.data.eval_path).resolve() == tmp_path / "e.csv"
    assert config.env.reward == str(there / "r.py:f")
    assert config.run.dir == str(tmp_path / "out")
    assert load_config(MODEL).model.path == str(tmp_path / "m")
    assert load_config(MODEL).data.path == ""


def test_a_config_survives_a_round_trip_and_cannot_be_changed() -> None:
    config = load_config(MODEL, ["learner.lr=0.1"])
    assert load_config(config) == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ValueError, match="frozen"):
        config.learner.lr = 0.2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "old", "corrections"),
    [
        ([], "engine", []),
        (["flow.max_age=0"], "learner", ["tis"]),
        (["flow.policy=synchronous"], "learner", ["tis"]),
        (["flow.policy=one_ahead"], "engine", []),
        (["flow.max_age='auto'"], "engine", []),
        (["algo.bundle='dr_grpo'", "algo.reduction.normalizer=8"], "engine", []),
        (["algo.bundle='decoupled'"], "learner", ["decoupled"]),
        (["algo.correction='tis'"], "learner", ["tis"]),
        (["algo.old='learner'"], "learner", ["tis"]),
        (["algo.loss='reinforce'"], "learner", []),
    ],
)
def test_clip_acts_on_tokens_of_older_weights_unless_the_file_says_otherwise(
    settings: list[str], old: str, corrections: list[str]
) -> None:
    algo = load_config({"model": {"path": "m"}}, settings).algo
    assert algo.old == old
    assert [part.kind for part in algo.correction] == corrections


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ([], False),
        (["algo.correction='tis'"], True),
        (["algo.correction='tis'", "flow.max_age=0"], False),
        (["algo.correction='loglinear'"], False),
        (["algo.loss='reinforce'"], False),
        (["algo.bundle='gspo'"], True),
    ],
)
def test_run_whose_clip_cannot_act_on_older_tokens_says_so(settings: list[str], idle: bool) -> None:
    found = find_idle_clip(load_config({"model": {"path": "m"}}, settings))
    assert bool(found) is idle
    assert all("algo.old = 'engine'" in words for words in found)
