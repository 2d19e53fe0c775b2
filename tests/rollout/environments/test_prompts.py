from __future__ import annotations

import pytest

from headrace.base.errors import DataError
from headrace.models.tiny import char_tokenizer
from headrace.rollout.environments.prompts import make_tasks

VOCAB = "abc<>:\n"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}:{{ m['content'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<a:{% endif %}"
)
CHAT = [{"role": "assistant", "content": "ab"}, {"role": "assistant", "content": "c"}]


def test_a_plain_prompt_is_read_as_it_stands() -> None:
    tokenizer = char_tokenizer(VOCAB, TEMPLATE)
    (task,) = make_tasks([{"q": "abca", "answer": 1}], "q", tokenizer, source="rows")
    assert task.prompt == "abca"
    assert task.prompt_ids_T.tolist() == tokenizer.encode("abca")
    assert task.row == {"q": "abca", "answer": 1}
    assert task.prompt_ids_T.dtype == "int32"


def test_a_chat_prompt_is_read_through_the_template_up_to_the_answer() -> None:
    tokenizer = char_tokenizer(VOCAB, TEMPLATE)
    (task,) = make_tasks([{"prompt": CHAT}], "prompt", tokenizer, source="rows")
    assert tokenizer.decode(task.prompt_ids_T.tolist()) == "<a:ab><a:c><a:"
    assert task.prompt == CHAT


@pytest.mark.parametrize(
    ("template", "row", "problem"),
    [
        (None, {"prompt": CHAT}, "chat messages, but the model's tokenizer has no chat template"),
        (TEMPLATE, {"question": "a", "answer": 1}, r"no column 'prompt' \(it has: question, answer\)"),
        (TEMPLATE, {"prompt": ""}, "the prompt is empty"),
        (TEMPLATE, {"prompt": None}, "the prompt is a NoneType"),
        (TEMPLATE, {"prompt": 3}, "the prompt is a int"),
        (TEMPLATE, {"prompt": []}, "the prompt is a list"),
        (TEMPLATE, {"prompt": [{"role": "usr", "content": "a"}]}, "without a known role"),
        (TEMPLATE, {"prompt": [{"role": "user"}]}, "without a known role and content"),
        (TEMPLATE, {"prompt": "\ud800"}, "refuses the prompt"),
        ("{{ raise_exception('roles must alternate') }}", {"prompt": CHAT}, "TemplateError: roles must alternate"),
    ],
)
def test_a_row_without_a_usable_prompt_is_refused_with_its_number(
    template: str | None, row: dict[str, object], problem: str
) -> None:
    tokenizer = char_tokenizer(VOCAB, template)
    with pytest.raises(DataError, match=problem) as refused:
        make_tasks([{"prompt": "a"}, row], "prompt", tokenizer, source="rows.jsonl")
    assert refused.value.problem.startswith("rows.jsonl, row 2: ")
