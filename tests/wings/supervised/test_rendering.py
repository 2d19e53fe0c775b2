"""Rows become tokens with the right masks, and rows that cannot be trained are refused or counted by name and row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ConfigError, DataError
from headrace.models import load_tokenizer
from headrace.wings.supervised.config import DpoConfig, SftConfig, load_tuning
from headrace.wings.supervised.preparing import PreparedTuning, explain_tuning, prepare_tuning
from headrace.wings.supervised.session import sft
from tests.wings.supervised.material import (
    FORGETFUL,
    MARKED,
    PLAIN,
    chat_model,
    conversations,
    settings,
    turn,
    write_rows,
)

TWO_TURNS = {"messages": [turn("user", "a"), turn("assistant", "bc"), turn("user", "d"), turn("assistant", "e")]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("models")
    templates = {"plain": PLAIN, "marked": MARKED, "forgetful": FORGETFUL, "none": None}
    return {name: chat_model(where / name, template) for name, template in templates.items()}


def prepared_rows(model: Path, rows: list[dict[str, Any]], verb: Any = SftConfig, **data: Any) -> PreparedTuning:
    return prepare_tuning(load_tuning(verb, settings(model, Path("unused"), data=data)), data=rows)


def trained(model: Path, row: dict[str, Any], verb: Any = SftConfig, **data: Any) -> list[str]:
    """The text of each sample of the row, with what carries loss in brackets."""
    tokenizer = load_tokenizer(str(model))
    texts = []
    for sample in prepared_rows(model, [row], verb, **data).rows.rows[0]:
        text = ""
        for place, token in enumerate(sample.ids_T.tolist()):
            begins = sample.mask_T[place] and not (place and sample.mask_T[place - 1])
            ends = sample.mask_T[place] and (place + 1 == len(sample.ids_T) or not sample.mask_T[place + 1])
            text += "[" * bool(begins) + tokenizer.decode([token]) + "]" * bool(ends)
        texts.append(text)
    return texts


@pytest.mark.parametrize("model", ["plain", "marked"])
def test_loss_is_on_the_turns_of_the_assistant_whether_the_template_marks_them_or_not(models, model):
    assert trained(models[model], TWO_TURNS) == ["<user>a<assistant>[bc<eos>]<user>d<assistant>[e<eos>]"]
    assert trained(models[model], TWO_TURNS, loss_on="last") == ["<user>a<assistant>bc<eos><user>d<assistant>[e<eos>]"]
    assert trained(models[model], TWO_TURNS, loss_on="all") == ["<[user>a<assistant>bc<eos><user>d<assistant>e<eos>]"]


def test_completions_text_and_tokens_are_trained_too(models):
    model = models["plain"]
    assert trained(model, {"prompt": "1+1=", "completion": "2"}) == ["1+1=[2<eos>]"]
    assert trained(model, {"prompt": "1+1=", "completion": "2"}, loss_on="all") == ["1[+1=2<eos>]"]
    assert trained(model, {"text": "abc"}) == ["a[bc<eos>]"]
    assert trained(model, {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}) == ["c[d]e"]
    chat = {"prompt": [turn("user", "a")], "completion": [turn("assistant", "b")]}
    assert trained(model, chat) == ["<user>a<assistant>[b<eos>]"]
    assert trained(model, {**chat, "completion": "b"}) == ["<user>a<assistant>[b<eos>]"]
    assert trained(model, {"q": "1+1=", "a": "2"}, columns={"prompt": "q", "completion": "a"}) == ["1+1=[2<eos>]"]


def test_a_pair_shares_its_prompt_as_text_messages_and_whole_conversations(models):
    model = models["plain"]
    chosen, rejected = "<user>a<assistant>[b<eos>]", "<user>a<assistant>[c<eos>]"
    ask, yes, no = turn("user", "a"), turn("assistant", "b"), turn("assistant", "c")
    assert trained(model, {"prompt": "a", "chosen": "b", "rejected": "c"}, DpoConfig) == ["a[b<eos>]", "a[c<eos>]"]
    for row in (
        {"prompt": [ask], "chosen": [yes], "rejected": [no]},
        {"prompt": [ask], "chosen": "b", "rejected": "c"},
        {"chosen": [ask, yes], "rejected": [ask, no]},
        {"prompt": "a", "chosen": [ask, yes], "rejected": [ask, no]},
        {"prompt": [ask], "chosen": [ask, yes], "rejected": [ask, no]},
    ):
        assert trained(model, row, DpoConfig) == [chosen, rejected]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [turn("user", "a")]}, "no turn of the assistant"),
        ({"messages": []}, "no list of messages"),
        ({"messages": [{"content": "a"}]}, "without a role"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"input_ids": [3, 4], "labels": [-100, -100]}, "none of its 2 tokens would carry loss"),
        ({"input_ids": [3, 4], "labels": [4, 5]}, "labels are not shifted"),
        ({"input_ids": [3, 4000]}, "token id 4000"),
        ({"input_ids": [3, 2**40]}, "input_ids is no list of token ids"),
        ({"question": "a"}, "it has the columns question"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused_by_name_and_row(models, tmp_path, row, words):
    path = write_rows(tmp_path / "rows.jsonl", [*conversations(2), row])
    with pytest.raises(DataError) as refused:
        prepare_tuning(load_tuning(SftConfig, settings(models["plain"], tmp_path, data={"path": str(path)})))
    assert f"{path}, row 3: " in str(refused.value)
    assert words in str(refused.value)


def test_a_prompt_that_is_no_prefix_of_its_conversation_is_refused_and_the_last_turn_is_not(models):
    with pytest.raises(DataError, match="renders its first 2 messages alone as something else") as refused:
        prepared_rows(models["forgetful"], [TWO_TURNS])
    assert "data, row 1" in str(refused.value)
    assert "data.loss_on = 'last'" in refused.value.remedy
    found = trained(models["forgetful"], TWO_TURNS, loss_on="last")
    assert found == ["<user>a<assistant>c<eos><user>d<assistant>[e<eos>]"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"chosen": [turn("user", "a"), turn("assistant", "b")], "rejected": [turn("user", "c")]},
            "answers to one prompt",
        ),
        (
            {"prompt": "a", "chosen": [turn("assistant", "b")], "rejected": [turn("assistant", "c")]},
            "answers to one prompt",
        ),
        (
            {"prompt": "z", "chosen": [turn("user", "a"), turn("assistant", "b")], "rejected": [turn("user", "a")]},
            "prompt is text ('z') that no message before the answers has",
        ),
        (
            {"prompt": [turn("user", "a")], "chosen": [turn("user", "b")], "rejected": "c"},
            "the answer chosen begins or ends with a turn of 'user'",
        ),
        (
            {"prompt": [turn("user", "a")], "chosen": [turn("user", "a")], "rejected": "c"},
            "chosen ends with the prompt",
        ),
        ({"chosen": [turn("user", "a")], "rejected": [turn("user", "a")]}, "chosen and rejected are the same"),
    ],
)
def test_answers_to_different_prompts_and_turns_of_others_are_never_compared(models, row, words):
    with pytest.raises(DataError) as refused:
        prepared_rows(models["plain"], [row], DpoConfig)
    assert words in str(refused.value)


def test_a_column_of_an_unknown_name_is_refused(models, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.columns\.promt") as refused:
        load_tuning(SftConfig, settings(models["plain"], tmp_path, data={"columns": {"promt": "q"}}))
    assert "did you mean 'prompt'" in refused.value.remedy


def test_messages_need_a_template(models):
    with pytest.raises(DataError, match="no chat template"):
        prepared_rows(models["none"], [TWO_TURNS])


def test_equal_answers_are_refused_or_counted(models):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    with pytest.raises(DataError, match="data, row 2: chosen and rejected are the same"):
        prepared_rows(models["plain"], rows, DpoConfig)
    found = prepared_rows(models["plain"], rows, DpoConfig, bad_rows="skip").rows
    assert [(row.row, row.reason) for row in found.left_out] == [(2, "same_answers")]
    assert len(found.rows) == 1
    longer = [{"prompt": "a" * 20, "chosen": "b" * 9, "rejected": "b" * 9 + "c"}]
    with pytest.raises(DataError, match="are the same in their first 24 tokens, to which they are cut"):
        prepared_rows(models["plain"], longer, DpoConfig, max_length=24, long_rows="cut")


def test_rows_left_out_are_counted_in_the_summary_and_listed_in_the_run_directory(models, tmp_path):
    rows = [*conversations(5), {"messages": [turn("user", "a")]}, {"text": "a" * 200}]
    tree = settings(models["plain"], tmp_path / "run", data={"bad_rows": "skip", "long_rows": "cut", "max_length": 60})
    summary = sft(tree, data=rows)
    assert (summary.rows_left_out, summary.rows_cut) == (1, 1)
    assert "1 row left out (no_assistant_turn 1), 1 row cut off at their limit" in summary.warnings
    (line,) = (tmp_path / "run" / "left_out.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["row"] == 6
    assert summary.ledger.groups.trained == 6


def test_long_rows_are_refused_left_out_or_cut_and_never_masked_to_nothing(models):
    rows = [{"prompt": "a" * 20, "completion": "b"}, {"prompt": "a", "completion": "bcdefgh"}]
    with pytest.raises(DataError, match=r"row 1: it has 22 tokens, more than data.max_length=6"):
        prepared_rows(models["plain"], rows, max_length=6)
    with pytest.raises(DataError, match=r"row 1: it has 22 tokens, and none of the first 6 carries loss"):
        prepared_rows(models["plain"], rows, max_length=6, long_rows="cut")
    found = prepared_rows(models["plain"], rows, max_length=6, long_rows="cut", bad_rows="skip").rows
    assert [len(row[0].ids_T) for row in found.rows] == [6]
    assert found.num_cut == 1
    with pytest.raises(DataError, match="has no row left to train"):
        prepared_rows(models["plain"], rows, max_length=2, long_rows="skip")


def test_sources_without_weight_are_refused(models, tmp_path):
    path = str(write_rows(tmp_path / "rows.jsonl", conversations(3)))
    for sources, words in (
        ([{"path": path, "weight": 0}], "none of its rows would ever be trained"),
        ([{"path": path, "weight": 1}, {"path": path}], "has no weight, and others have one"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_tuning(SftConfig, settings(models["plain"], tmp_path, data={"sources": sources}))


def test_weighted_sources_are_visited_by_their_weights_and_each_row_once_per_pass(models, tmp_path):
    sources = [
        {"path": str(write_rows(tmp_path / f"{name}.jsonl", conversations(size, seed=size))), "weight": weight}
        for name, size, weight in (("a", 10, 3), ("b", 40, 1))
    ]
    tree = settings(models["plain"], tmp_path, data={"sources": sources}, run={"steps": 1000, "rows_per_step": 4})
    prepared = prepare_tuning(load_tuning(SftConfig, tree))
    rows = np.concatenate([prepared.schedule.rows(step) for step in range(1000)])
    assert np.mean(rows < 10) == pytest.approx(0.75, abs=0.03)
    of_first = rows[rows < 10]
    for begin in range(0, 100, 10):
        assert sorted(of_first[begin : begin + 10]) == list(range(10))
    assert "75.0% of the places" in explain_tuning(prepared)


def test_a_run_says_by_which_columns_it_reads_rows_that_could_be_read_in_several_ways(models, tmp_path):
    rows = [{**row, "text": "other", "prompt": "beside", "completion": "this"} for row in conversations(4)]
    config = load_tuning(SftConfig, settings(models["plain"], tmp_path))
    prepared = prepare_tuning(config, data=rows)
    assert "Note: of the rows, messages are read, and not prompt with completion, text." in explain_tuning(prepared)
    alone = prepare_tuning(config, data=conversations(4))
    assert alone.rows.fingerprint() == prepared.rows.fingerprint()
    assert "Note" not in explain_tuning(alone)


def test_csv_and_parquet_hold_the_same_rows_as_jsonl(models, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    rows = conversations(6)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    cells = [json.dumps(row["messages"]).replace('"', '""') for row in rows]
    (tmp_path / "rows.csv").write_text("messages\n" + "".join(f'"{cell}"\n' for cell in cells), encoding="utf-8")
    write_rows(tmp_path / "rows.jsonl", rows)
    prints = set()
    for name in ("rows.jsonl", "rows.parquet", "rows.csv"):
        tree = settings(models["plain"], tmp_path, data={"path": str(tmp_path / name)})
        prints.add(prepare_tuning(load_tuning(SftConfig, tree)).rows.fingerprint())
    assert len(prints) == 1
