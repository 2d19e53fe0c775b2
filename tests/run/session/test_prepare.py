"""What is refused before any process starts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.environ import PART_OF_A_RUN
from headrace.base.errors import ConfigError, DataError, EnvError, HeadraceError, ModelError
from headrace.control.observer import Observers
from headrace.run.session import evaluate, load_config, train
from headrace.run.session.explain import explain, find_non_default_settings
from headrace.run.session.prepare import Inputs, Prepared, make_order, prepare
from headrace.sync.config import RunPlaces
from tests.models.kinds import add_tokens
from tests.run.session.runs import make_run, tiny_model

Prepare = Callable[..., Prepared]


@pytest.fixture
def prepared(tmp_path: Path, model_dir: Path) -> Prepare:
    def of(*overrides: str, inputs: Inputs | None = None, **files: Any) -> Prepared:
        run_file = make_run(tmp_path / "work", files.pop("model", model_dir), **files)
        return prepare(load_config(run_file, overrides), inputs or Inputs())

    return of


def test_a_run_that_can_work_is_prepared(prepared: Prepare) -> None:
    made = prepared()
    assert len(made.tasks) == 12
    assert made.max_context == len("10+11=") + 4
    assert made.decode([3, 1, 4]) == "01"  # the end of the sequence is no text
    assert made.sampling.stop_ids == (1,)


BROKEN = "import not_installed\ndef reward(completion): ...\nasync def rollout(task, policy): ...\n"
ROLLOUT = {"kind": "rollout", "entry": "reward.py:rollout", "reward": ""}


def _without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _cut_short(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _without_one_file(model: Path) -> None:
    index = {"weight_map": {"one": "model.safetensors", "other": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_without_weights, "holds no *.safetensors file"),
        (_cut_short, "model.safetensors is damaged or incomplete"),
        (_without_one_file, "holds no model-00002-of-00002.safetensors"),
    ],
)
def test_missing_or_incomplete_weights_are_refused_before_anything_starts(
    spoil: Callable[[Path], None], problem: str, prepared: Prepare, model_dir: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(model_dir, tmp_path / "spoilt"))
    spoil(model)
    with pytest.raises(ModelError, match=re.escape(problem)):
        prepared(model=model)


@pytest.mark.parametrize("asked", [False, True])
def test_entropies_are_recorded_for_the_dashboard_where_that_is_asked_for(asked: bool, prepared: Prepare) -> None:
    assert prepared(f"observe.record_entropy={str(asked).lower()}").sampling.record_entropy is asked


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"data": {"path": ""}}, ConfigError, "data.path is not set"),
        ({"env": {"reward": ""}}, ConfigError, "env.reward is not set"),
        ({"env": {"reward": "reward.py"}}, EnvError, "does not name a function"),
        ({"env": {"reward": "reward.py:rewrad"}}, EnvError, r"defines no 'rewrad'\n.*reward"),
        ({"reward": "def reward(completion)\n    return 1"}, EnvError, r"reward.py:1: "),
        ({"reward": BROKEN}, ConfigError, "env.reward: .*reward.py:1: there is no module 'not_installed'"),
        (
            {"reward": BROKEN, "env": {"kind": "rollout", "entry": "reward.py:rollout"}},
            ConfigError,
            "env.*'not_installed'",
        ),
        ({"env": {"kind": "program", "command": "python nowhere.py"}}, EnvError, "no file 'nowhere.py' for python"),
        ({"model": Path("nowhere")}, ModelError, "model.path=.*does not exist"),
        ({"rows": ""}, DataError, "rows.jsonl has no rows"),
        ({"rows": '{"prompt": "1"}\n{"prompt"}\n'}, DataError, "rows.jsonl:2: not JSON"),
        ({"rows": '{"question": "1"}\n'}, DataError, "rows.jsonl, row 1: no column 'prompt'"),
        ({"rows": '{"prompt": [{"role": "user", "content": "1"}]}'}, DataError, "has no chat template"),
        ({"rows": '{"prompt": "' + "1" * 40 + '"}'}, ConfigError, "no prompt fits: the shortest has 40 tokens"),
        ({"engine": {"max_new_tokens": 32}}, ConfigError, r"(?s)no prompt fits.*lower engine.max_new_tokens"),
        ({"engine": {"max_context": 64}}, ConfigError, "max_context=64 is more than the model's context of 32"),
        ({"engine": {"max_context": 6}}, ConfigError, "no prompt fits"),
        ({"engine": {"speculation": "heads"}}, ModelError, "'heads', and model.path=.* is a qwen3, of which no pred"),
        ({"data": {"epochs": 1}, "flow": {"groups_per_step": 999}}, ConfigError, "fewer than one batch .*=999"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    prepared: Prepare, changes: dict[str, Any], kind: type[HeadraceError], problem: str
) -> None:
    with pytest.raises(kind, match=problem) as refused:
        prepared(**changes)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        (["learner.tokens_per_microbatch=9"], "=9, and a sample may have 10 tokens", "tokens_per_microbatch >= 10"),
        (['learner.reference={kind="frozen",path="nowhere"}'], r"learner\.reference\.path='.*nowhere'", "of a model"),
        (['learner.reference={kind="model",path="nowhere"}'], r"learner\.reference\.path='.*nowhere'", "of a model"),
        (["algo.advantage=gae", "learner.critic.path=nowhere"], r"learner\.critic\.path='.*nowhere'", "of a model"),
        (["model.lora.adapter=nowhere"], r"model\.lora\.adapter='.*nowhere'", "of an adapter"),
        (
            ["model.deterministic=true", "learner.parallel.data=2"],
            "in one process only",
            "leave model.deterministic out",
        ),
        (
            ["model.lora.use_dora=true", "learner.parallel.tensor=2"],
            "use_dora=true: each rank",
            "tensor = 1 and data to 2",
        ),
        (["learner.parallel.tensor=3"], "tensor=3 does not fit", "a divisor of 2"),
    ],
)
def test_what_the_learner_could_not_do_is_refused_before_anything_starts(
    prepared: Prepare, overrides: list[str], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        prepared(*overrides)
    assert remedy in refused.value.remedy


def test_prompts_that_are_all_too_long_are_refused_even_where_held_out_ones_fit(
    tmp_path: Path, prepared: Prepare
) -> None:
    (tmp_path / "short.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(ConfigError, match="no prompt fits"):
        prepared(f"data.eval_path={tmp_path / 'short.jsonl'}", rows='{"prompt": "' + "1" * 40 + '"}')


def test_a_model_directory_without_a_tokenizer_or_its_end_is_refused(tmp_path: Path, prepared: Prepare) -> None:
    bare = tiny_model(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        prepared(model=bare)
    shutil.rmtree(tmp_path / "work")
    endless = tiny_model(tmp_path / "endless")
    settings = json.loads((endless / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (endless / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="has no end-of-sequence token"):
        prepared(model=endless)


def test_prompt_that_only_the_tokenizer_knows_is_refused_by_its_row(tmp_path: Path, prepared: Prepare) -> None:
    model = tiny_model(tmp_path / "more")
    token = add_tokens(model)
    rows = '{"prompt": "1"}\n{"prompt": "' + token + '"}'
    with pytest.raises(ConfigError, match=r"the prompt of row 2 of data\.path holds token \d+, and the vocabulary of"):
        prepared(model=model, rows=rows)


def test_a_model_directory_that_is_a_file_is_refused(tmp_path: Path, prepared: Prepare) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match="cannot be read: Not a directory"):
        prepared(model=tmp_path / "model.bin")


def test_ends_of_sequence_come_from_tokenizer_and_generation_settings(tmp_path: Path, prepared: Prepare) -> None:
    model = tiny_model(tmp_path / "many")
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert prepared(model=model).sampling.stop_ids == (1, 5)
    shutil.rmtree(tmp_path / "work")
    (model / "generation_config.json").write_text("[]")
    assert prepared(model=model).sampling.stop_ids == (1,)


def test_rows_and_reward_may_be_handed_over_in_python(prepared: Prepare) -> None:
    given = Inputs(data=[{"prompt": "1+1="}], eval_data=[{"prompt": "2"}, {"prompt": "3"}], reward=exact)
    made = prepared('data.path=""', 'env.reward=""', inputs=given)
    assert [len(made.tasks), len(made.eval_tasks)] == [1, 2]
    assert made.config.env.reward == f"{Path(__file__).resolve()}:exact"


def test_rows_are_not_taken_from_two_places(prepared: Prepare) -> None:
    with pytest.raises(ConfigError, match="rows are handed over too"):
        prepared(inputs=Inputs(data=[{"prompt": "1"}]))


@pytest.mark.parametrize("value", [object(), np.float32(1), 2**70, "\ud800"])
def test_rows_that_cannot_reach_the_reward_are_refused_with_their_number(prepared: Prepare, value: object) -> None:
    rows = [{"prompt": "1"}, {"prompt": "1", "value": value}]
    with pytest.raises(DataError, match="row 2 cannot be handed to the reward function"):
        prepared('data.path=""', inputs=Inputs(data=rows))


def test_a_row_whose_column_names_are_no_text_is_refused(prepared: Prepare) -> None:
    with pytest.raises(DataError, match="row 1 cannot be handed to the reward function"):
        prepared('data.path=""', inputs=Inputs(data=[{"prompt": "1", 5: 1}]))


def test_other_rows_have_another_fingerprint_and_another_length_of_the_run_has_not(prepared: Prepare) -> None:
    fingerprints = []
    for overrides, rows in (
        ([], None),
        (["run.steps=9", "run.stall_timeout_s=9"], None),
        (["learner.lr=9"], None),
        ([], '{"prompt": "1"}'),
    ):
        made = prepared(*overrides, rows=rows)
        fingerprints.append(made.fingerprint())
        shutil.rmtree(Path(made.config.data.path).parent)
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


def test_a_script_that_is_imported_for_its_reward_starts_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PART_OF_A_RUN, "1")
    for start in (train, evaluate):
        with pytest.raises(ConfigError, match=r'(?s)by a process of a run.*if __name__ == "__main__"'):
            start({"model": {"path": "m"}})


def exact(completion: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (0, ["Engine on cpu, learner on cpu."]),
        (
            1,
            [
                "Engine on cuda:0, learner on cuda:0.",
                "cache of at most 30% of the memory that is free then; what remains is the learner's.",
            ],
        ),
        (3, ["Engine on cuda:2, learner on cuda:0.", "cache of at most 90% of the memory that is free then."]),
    ],
)
def test_a_dry_run_says_where_the_parts_compute_and_who_gets_how_much_memory(
    prepared: Prepare, gpus: int, words: list[str]
) -> None:
    said = explain(prepared(inputs=Inputs(gpus=gpus)))
    assert all(word in said for word in words), said


def test_a_device_that_is_not_there_is_refused_before_anything_starts(prepared: Prepare) -> None:
    with pytest.raises(ConfigError, match=r"learner.device='cuda:2', and torch sees 2 GPUs") as refused:
        prepared("learner.device=cuda:2", inputs=Inputs(gpus=2))
    assert "learner.device = 'auto'" in refused.value.remedy


def test_a_name_that_is_no_device_is_refused(prepared: Prepare) -> None:
    with pytest.raises(ConfigError, match=r"engine.device='gpu': .*'cuda' or 'cuda:' and the number of one"):
        prepared("engine.device=gpu")


def test_a_run_may_go_on_on_other_devices(prepared: Prepare) -> None:
    here = prepared()
    there = replace(here, config=load_config(here.config, ["engine.device=cuda", "learner.device=cuda:1"]))
    assert here.fingerprint() == there.fingerprint()
    vllm = ["engine.kind=vllm", "launch.start_timeout_s=400"]
    formerly, today = ['engine.server.args=["-tp", "2"]'], ["engine.tensor=2"]
    two = [replace(here, config=load_config(here.config, [*vllm, *way])).fingerprint() for way in (formerly, today)]
    assert two[0] == two[1] != here.fingerprint()


def test_a_dry_run_says_what_a_value_means_and_of_tables_only_what_was_set(prepared: Prepare) -> None:
    made = prepared(env={"kind": "rollout", "entry": "reward.py:reward"})
    found = {each.name: each for each in find_non_default_settings(made.config)}
    assert found["env.kind"].words == "rollout: an async def rollout(task, policy)"
    filtered = load_config(made.config, ["flow.filters=[{kind='length', all_masked='keep'}]"])
    shown = {each.name: each.value for each in find_non_default_settings(filtered)}
    assert shown["flow.filters"] == [{"kind": "length", "all_masked": "keep"}]


@pytest.mark.parametrize(
    ("change", "longest_s", "silence_s"),
    [
        ("model.dtype=bfloat16", 60 + 64_000 / 50, 30),  # 32B parameters: 22 minutes
        ("sync.deadline_s=800", 800, 400),
        ("model.lora.rank=2", 60, 30),  # adapters alone travel
    ],
)
def test_the_deadline_of_a_version_grows_with_its_bytes(
    change: str, longest_s: float, silence_s: float, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.run.session.prepare.num_weight_bytes", lambda _, size: size * 32_000_000_000)
    monkeypatch.setattr("headrace.sync.estimate._hash_s", lambda clock: 0.003)  # 10 GB/s
    order = make_order(prepared(change), run_dir=Path("run"), snapshot=None, observers=Observers(()))
    assert order.sync.longest_s(order.version_bytes) == longest_s
    places = RunPlaces(run_dir=order.run_dir, memory=Path("memory"), private=Path("private"))
    route = order.sync.route(places, order.version_bytes)
    assert (route.deadline_s, route.silence_s) == (longest_s / 2, silence_s)


@pytest.mark.parametrize(
    ("changes", "bytes_", "seconds"),
    [
        (("sync.deadline_s=8",), "128,000,000,000", "11 s at least"),
        (("sync.deadline_s=3", "sync.codec=cast_bf16"), "64,000,000,000", "5.7 s at least"),
        (("sync.deadline_s=99", "sync.transport=http", "sync.network_gb_s=1"), "128,000,000,000", "139 s at least"),
    ],
)
def test_a_deadline_that_no_version_can_meet_is_refused_with_the_time_and_the_default(
    changes: tuple[str, ...], bytes_: str, seconds: str, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.run.session.prepare.num_weight_bytes", lambda _, size: size * 32_000_000_000)
    monkeypatch.setattr("headrace.sync.estimate._hash_s", lambda clock: 0.003)
    with pytest.raises(
        ConfigError, match=f"is too short: .* has {bytes_} bytes and takes {re.escape(seconds)}"
    ) as refused:
        prepared(*changes)
    assert "leave sync.deadline_s out" in refused.value.remedy


def test_the_rate_of_the_network_does_not_make_another_run_of_it(prepared: Prepare) -> None:
    here = prepared("sync.transport=http")
    there = replace(here, config=load_config(here.config, ["sync.network_gb_s=1"]))
    assert here.fingerprint() == there.fingerprint()
