"""The rendering of rows as tokens, with the mask of the tokens that carry loss.

    messages            the whole conversation by the chat template; loss on the assistant's turns
    prompt, completion  text: each is tokenised alone, as for generation; messages: as one conversation
    text                plain text; loss on every token but the first
    input_ids           tokens, optionally with labels (−100: no loss)
    prompt, chosen, rejected     a pair of answers to one prompt, as text, messages or tokens
    prompt, completion, label    one answer, good (true) or bad (false)
    input_ids, teacher_ids, teacher_logprobs     tokens, and a teacher's log-probabilities for each of them

A chat template may mark the assistant's turns with ``{% generation %}``. Without such marks the turns are found by
exact prefixes: the rendered conversation up to a turn, with the generation prompt, must be a prefix of the rendered
whole conversation, in text and in tokens. A row that violates this is refused, because at generation the model would
read another prompt than in training.

Shape legend: T tokens of one sample.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import DataError
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import IntColumn
from headrace.base.types.versions import FROZEN
from headrace.wings.supervised.config import LossOn

Messages = list[dict[str, Any]]
IGNORED = -100
"""The label of a token that carries no loss."""
_MARKS = re.compile(r"{%-?\s*generation\b")


FORMS: tuple[tuple[str, ...], ...] = (("messages",), ("input_ids",), ("prompt", "completion"), ("text",))
"""The sets of columns that identify the form of a row of supervised training, in order of preference."""


class RowProblem(DataError):
    """The error of a row that cannot be trained. ``reason`` is one word, by which such rows are counted; ``problem``
    describes the error in words."""

    def __init__(self, reason: str, problem: str, *, remedy: str) -> None:
        """Create the error with its ``reason``; ``problem`` and ``remedy`` are its text."""
        super().__init__(problem, remedy=remedy)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSample:
    """One sequence of tokens to train on. A row has one sample, or two if it is a pair of answers."""

    ids_T: IntColumn
    """The token ids, prompt included."""
    mask_T: npt.NDArray[np.bool_]
    """Whether each token carries loss. The first token never does, because no token precedes it."""
    side: int = 0
    """1 for a chosen (or good) answer, −1 for a rejected (or bad) one, 0 for a sample to imitate."""
    num_prompt: int = 0
    """The number of prompt tokens of a sample with a side (chosen or rejected); 0 otherwise."""
    teacher_scores: TeacherScores | None = None
    """The teacher's log-probabilities of each token; ``None`` unless the row contains them or a teacher has computed
    them."""


class RowRenderer:
    """Renders rows as samples with the tokenizer and the chat template of one model. Each public method renders one
    form of row, and returns all samples of the row."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], loss_on: LossOn, *, prompt_loss: bool = False) -> None:
        """Create a renderer with the model's ``tokenizer``. ``stop_ids`` are the ids of the tokens that end an answer.
        ``loss_on`` selects the tokens of a conversation that carry loss: all turns of the assistant (``assistant``),
        its last turn (``last``), or every token (``all``). With ``prompt_loss``, the prompt before a chosen answer also
        carries loss."""
        self._prompt_loss = prompt_loss
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._loss_on = loss_on
        self.unread = ""
        """A note about columns that were not read, set by the first row that has the columns of several forms; empty if
        there was no such row."""
        self._template: str | None = tokenizer.chat_template
        """The model's chat template; ``None`` if it has none."""
        self._marked = self._template is not None and _MARKS.search(self._template) is not None
        """Whether the template marks the assistant's turns with ``{% generation %}``."""

    # -- one sample a row ---------------------------------------------------------------------------------------------

    def supervised(self, row: Mapping[str, Any]) -> tuple[RenderedSample, ...]:
        """Return the one sample of a row for supervised training, in a tuple. The row has a conversation, token ids, a
        prompt with its completion, or plain text; if it has several of these, the first of :data:`FORMS` is used.
        Raises :class:`RowProblem` for a row that cannot be trained on."""
        self.unread = self.unread or _describe_unread(row)
        if "messages" in row:
            ids, mask = self._conversation(_messages(row["messages"], "messages"), 0, _tools(row))
        elif "input_ids" in row:
            ids, mask = _labelled_ids(row)
        elif "completion" in row and "prompt" in row:
            ids, mask = self._completion(row["prompt"], row["completion"], _tools(row))
        elif "text" in row:
            ids = self._with_stop_token([*self._encode_start(_text(row["text"], "text"))])
            mask = [True] * len(ids)  # _sample removes the loss from the first token
        else:
            raise _make_missing_columns_error(row, "messages; prompt and completion; text; or input_ids")
        return (_sample(ids, mask),)

    def _completion(self, prompt: Any, completion: Any, tools: Any) -> tuple[list[int], list[bool]]:
        """Return the token ids of a prompt followed by its completion, and whether each carries loss. Both are text or
        messages. ``tools`` are the descriptions of tools for the chat template, or ``None``."""
        if isinstance(prompt, list) and isinstance(completion, list):
            before = _messages(prompt, "prompt")
            return self._conversation([*before, *_messages(completion, "completion")], len(before), tools)
        if isinstance(prompt, list) and isinstance(completion, str):
            before = _messages(prompt, "prompt")
            answer_turn = {"role": "assistant", "content": _text(completion, "completion")}
            return self._conversation([*before, answer_turn], len(before), tools)
        prompt_ids = self._encode_start(_text(prompt, "prompt"))
        answer = self._with_stop_token(self._encode(_text(completion, "completion")))
        return [*prompt_ids, *answer], [self._loss_on == "all"] * len(prompt_ids) + [True] * len(answer)

    def distilled(self, row: Mapping[str, Any]) -> tuple[RenderedSample, ...]:
        """Return the only sample of a row of tokens that contains a teacher's scores of each token. Raises
        :class:`RowProblem` for another row."""
        if not {"input_ids", "teacher_ids", "teacher_logprobs"} <= row.keys():
            raise _make_missing_columns_error(
                row,
                "input_ids, teacher_ids and teacher_logprobs, since no model is the teacher",
            )
        (sample,) = self.supervised({name: row[name] for name in ("input_ids", "labels") if name in row})
        return (replace(sample, teacher_scores=_teacher_scores(row, sample)),)

    # -- a pair a row -------------------------------------------------------------------------------------------------

    def pair(self, row: Mapping[str, Any]) -> tuple[RenderedSample, ...]:
        """Return the two samples of a row with a pair of answers: the chosen answer with side 1, then the rejected
        answer with side −1. Raises :class:`RowProblem` for a row that is not a pair."""
        both: list[tuple[list[int], list[int]]]
        if {"prompt_ids", "chosen_ids", "rejected_ids"} <= row.keys():
            prompt_ids = _token_ids(row["prompt_ids"], "prompt_ids")
            both = [(prompt_ids, _token_ids(row[name], name)) for name in ("chosen_ids", "rejected_ids")]
        elif {"chosen", "rejected"} <= row.keys():
            if row["chosen"] == row["rejected"]:
                raise _make_same_answers_error()
            both = [self._answer(row, name) for name in ("chosen", "rejected")]
        else:
            raise _make_missing_columns_error(
                row, "prompt, chosen and rejected; or prompt_ids, chosen_ids and rejected_ids"
            )
        if both[0] == both[1]:
            raise _make_same_answers_error()
        return tuple(
            _sample(
                [*prompt_ids, *answer],
                [self._prompt_loss and side > 0] * len(prompt_ids) + [True] * len(answer),
                side=side,
                num_prompt=len(prompt_ids),
            )
            for (prompt_ids, answer), side in zip(both, (1, -1), strict=True)
        )

    def _answer(self, row: Mapping[str, Any], name: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a row's prompt, and of the answer in its column ``name`` (``chosen`` or
        ``rejected``). Prompt and answer are text or messages; an answer may also be a whole conversation that begins
        with the prompt."""
        value = row[name]
        if not isinstance(value, list):
            if "prompt" not in row:
                raise _make_missing_columns_error(row, "prompt, chosen and rejected")
            prompt = row["prompt"]
            if isinstance(prompt, list):
                before, answer = _messages(prompt, "prompt"), [{"role": "assistant", "content": _text(value, name)}]
                return self._split_answer([*before, *answer], len(before), _tools(row))
            return self._encode_start(_text(prompt, "prompt")), self._with_stop_token(self._encode(_text(value, name)))
        answer = _messages(value, name)
        if isinstance(row.get("prompt"), list):
            before = _messages(row["prompt"], "prompt")
            if answer[: len(before)] == before:
                answer = answer[len(before) :]  # the answer column contains the whole conversation
        else:
            before = _common_prompt(row)
            answer = answer[len(before) :]
        _refuse_other_turns(answer, name)
        return self._split_answer([*before, *answer], len(before), _tools(row))

    def _split_answer(self, messages: Messages, num_before: int, tools: Any) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation in two parts: the first ``num_before`` messages with the generation
        prompt, and the rest, which is the answer up to its last stop token."""
        text = self._render(messages, tools, answer=False)
        ids = self._encode(text)
        start = self._prefix_length(ids, text, self._render(messages[:num_before], tools, answer=True), num_before)
        return ids[:start], self._without_tail(ids[start:])

    def labelled(self, row: Mapping[str, Any]) -> tuple[RenderedSample, ...]:
        """Return the only sample of a row with one answer and its label: with side 1 if the answer is good (true), and
        −1 if it is bad (false). Raises :class:`RowProblem` for another row."""
        if not {"prompt", "completion", "label"} <= row.keys():
            raise _make_missing_columns_error(row, "prompt, completion and label")
        label = _decode_cell(row["label"].lower() if isinstance(row["label"], str) else row["label"])
        if label not in (True, False):
            raise RowProblem("no_label", f"label is {row['label']!r}", remedy="give true for a good answer, or false")
        prompt_ids, answer = self._answer({**row, "chosen": row["completion"]}, "chosen")
        mask = [False] * len(prompt_ids) + [True] * len(answer)
        return (_sample([*prompt_ids, *answer], mask, side=1 if label else -1, num_prompt=len(prompt_ids)),)

    # -- conversations ------------------------------------------------------------------------------------------------

    def _conversation(self, messages: Messages, num_before: int, tools: Any) -> tuple[list[int], list[bool]]:
        """Return the token ids of a conversation, and whether each carries loss. The first ``num_before`` messages are
        a prompt without loss, unless ``loss_on`` is ``all``. ``tools`` are the descriptions of tools for the chat
        template, or ``None``."""
        turns = [n for n, one in enumerate(messages) if one["role"] == "assistant" and n >= num_before]
        if self._loss_on != "all" and not turns:
            raise RowProblem(
                "no_assistant_turn",
                "it has no turn of the assistant, so no token would carry loss",
                remedy="remove the row, or set data.loss_on = 'all'",
            )
        if self._marked and self._loss_on != "all" and not num_before:
            return self._conversation_by_marks(messages, tools)
        text = self._render(messages, tools, answer=False)
        ids = self._encode(text)
        if self._loss_on == "all":
            return ids, [True] * len(ids)
        mask = [False] * len(ids)
        for turn in turns[-1:] if self._loss_on == "last" else turns:
            start = self._prefix_length(ids, text, self._render(messages[:turn], tools, answer=True), turn)
            end = self._prefix_length(ids, text, self._render(messages[: turn + 1], tools, answer=False), turn + 1)
            end = start + len(self._without_tail(ids[start:end]))
            mask[start:end] = [True] * (end - start)
        return ids, mask

    def _conversation_by_marks(self, messages: Messages, tools: Any) -> tuple[list[int], list[bool]]:
        """Return the token ids of a conversation, and whether each carries loss, with the mask that a chat template
        with ``{% generation %}`` marks returns."""
        rendered = self._apply_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(rendered["input_ids"]), [bool(each) for each in rendered["assistant_masks"]]
        if self._loss_on == "last" and any(mask):
            last = len(mask) - 1 - mask[::-1].index(True)
            first = next((place + 1 for place in range(last, -1, -1) if not mask[place]), 0)
            mask = [first <= place <= last for place in range(len(mask))]
        return ids, mask

    def _prefix_length(self, ids: list[int], text: str, prefix: str, num_messages: int) -> int:
        """Return the number of tokens of ``prefix``, the rendering of the first ``num_messages`` messages alone. Raises
        :class:`RowProblem` unless ``prefix`` is a prefix of ``text``, the rendered whole conversation, and its tokens
        are a prefix of ``ids``, the tokens of the whole."""
        if not text.startswith(prefix):
            same = next((n for n, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), len(text))
            raise RowProblem(
                "not_a_prefix",
                f"the chat template renders its first {num_messages} messages alone as something else than at the "
                f"beginning of the conversation: {prefix[same : same + 30]!r} instead of {text[same : same + 30]!r}",
                remedy="set data.loss_on = 'last', mark the assistant's turns in the template with {% generation %}, "
                "or mend the row",
            )
        prefix_ids = self._encode(prefix)
        if ids[: len(prefix_ids)] != prefix_ids:
            raise RowProblem(
                "not_a_prefix",
                f"the tokens of its first {num_messages} messages are not the first tokens of the conversation: one "
                "token spans their end",
                remedy="mark the assistant's turns in the template with {% generation %}, or mend the row",
            )
        return len(prefix_ids)

    def _without_tail(self, ids: list[int]) -> list[int]:
        """Return the token ids of an answer up to its last stop token, or all of them if there is no stop token. The
        model does not sample text that a template writes after the stop token."""
        ends = [place for place, token in enumerate(ids) if token in self._stop_ids]
        return ids[: ends[-1] + 1] if ends else ids

    def _render(self, messages: Messages, tools: Any, *, answer: bool) -> str:
        """Return messages rendered as text by the chat template; empty for no messages. ``tools`` are the descriptions
        of tools for the template, or ``None``. With ``answer``, the generation prompt of the assistant follows. Raises
        :class:`RowProblem` if there is no template, or if it refuses the messages."""
        if self._template is None:
            raise RowProblem(
                "no_template",
                "it holds messages, and the model's tokenizer has no chat template",
                remedy="use a chat model, add a chat_template.jinja to the model directory, or give text",
            )
        if not messages:
            return ""
        text: str = self._apply_template(messages, tools=tools, tokenize=False, add_generation_prompt=answer)
        return text

    def _apply_template(self, messages: Messages, **options: Any) -> Any:
        """Return what the chat template makes of ``messages`` with the ``options`` of the tokenizer's method. Raises
        :class:`RowProblem` if the template raises an error."""
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # noqa: BLE001 - a template is code of the model directory
            raise RowProblem(
                "template_error",
                f"the chat template refuses it: {type(error).__name__}: {str(error)[:200]}",
                remedy="mend the row, or the chat template of the model directory",
            ) from None

    # -- text ---------------------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without added special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _encode_start(self, text: str) -> list[int]:
        """Return the token ids of a text at the beginning of a sequence: with the beginning-of-sequence token if the
        tokenizer adds one, but without an end-of-sequence token."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids[:-1] if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id else ids

    def _with_stop_token(self, ids: list[int]) -> list[int]:
        """Return the token ids of an answer with a stop token at the end; the end-of-sequence token is appended if
        there is none."""
        return ids if ids and ids[-1] in self._stop_ids else [*ids, self._tokenizer.eos_token_id]


def _describe_unread(row: Mapping[str, Any]) -> str:
    """Return in words which columns of a row are read, and which columns of other forms (:data:`FORMS`) are ignored;
    empty if the row has the columns of one form only.

    >>> _describe_unread({"messages": [], "text": "", "prompt": ""})
    'messages are read, and not text'
    """
    used, *ignored = [form for form in FORMS if set(form) <= row.keys()] or [()]
    if not ignored:
        return ""
    return f"{' and '.join(used)} are read, and not {', '.join(' with '.join(form) for form in ignored)}"


def _sample(ids: list[int], mask: list[bool], *, side: int = 0, num_prompt: int = 0) -> RenderedSample:
    """Return a sample of these tokens, whose mask is ``True`` for tokens that carry loss, except for the first token.
    Raises :class:`RowProblem` if no token would carry loss."""
    mask_T = np.array(mask, bool)
    mask_T[:1] = False
    if not mask_T.any():
        raise RowProblem(
            "no_loss_tokens", f"none of its {len(ids)} tokens would carry loss", remedy="remove the row, or mend it"
        )
    return RenderedSample(ids_T=np.array(ids, np.int32), mask_T=mask_T, side=side, num_prompt=num_prompt)


def _labelled_ids(row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a row of tokens, and whether each carries loss. A label is the token's own id, or −100
    for no loss; without labels, every token carries loss. Raises :class:`RowProblem` for labels that do not match the
    tokens."""
    ids = _token_ids(row["input_ids"], "input_ids")
    labels = _decode_cell(row["labels"]) if "labels" in row else ids
    if not isinstance(labels, list) or len(labels) != len(ids):
        raise RowProblem(
            "misaligned", f"labels do not have one entry for each of the {len(ids)} input_ids", remedy="mend the row"
        )
    other = next((n for n, (a, b) in enumerate(zip(ids, labels, strict=True)) if b not in (a, IGNORED)), None)
    if other is not None:
        raise RowProblem(
            "misaligned",
            f"label {other} is {labels[other]!r}, and the token there is {ids[other]}",
            remedy=f"give each token's own id as its label, or {IGNORED}; labels are not shifted",
        )
    return ids, [label != IGNORED for label in labels]


def _teacher_scores(row: Mapping[str, Any], sample: RenderedSample) -> TeacherScores:
    """Return the teacher's scores of ``sample`` from its row: for each token with loss, the K likeliest entries of the
    teacher's distribution with their log-probabilities. Other tokens have no scores. A token that is not among its K
    entries gets the remaining probability. Raises :class:`RowProblem` for columns that do not match the tokens."""
    columns = [_decode_cell(row[name]) for name in ("teacher_ids", "teacher_logprobs")]
    count, places = len(sample.ids_T), np.flatnonzero(sample.mask_T).tolist()
    if not all(isinstance(column, list) and len(column) == count for column in columns):
        raise _make_misaligned_teacher_error(f"do not have one list for each of the {count} input_ids")
    entries = [(columns[0][place], columns[1][place]) for place in places]
    num = len(entries[0][0] or ())
    for place, (ids, logs) in zip(places, entries, strict=True):
        if not (isinstance(ids, list) and isinstance(logs, list) and len(ids) == len(logs) == num > 0):
            raise _make_misaligned_teacher_error(
                f"of token {place} are not as many as of the first that carries loss, {num}"
            )
        if len(set(ids)) != num or not all(type(each) is int and 0 <= each < 2**31 for each in ids):
            raise _make_misaligned_teacher_error(f"of token {place} are not {num} different ids")
        if not all(isinstance(each, int | float) and each <= MOST for each in logs) or _mass(logs) > 1 + MOST:
            raise _make_misaligned_teacher_error(f"of token {place} are no log-probabilities: {str(logs)[:60]}")
    scores = TeacherScores.none(count, num)
    scores.versions_T[places] = FROZEN
    scores.ids_TK[places] = [ids for ids, _ in entries]
    scores.logs_TK[places] = [[max(each, LEAST) for each in logs] for _, logs in entries]
    for place, (ids, logs) in zip(places, entries, strict=True):
        own = int(sample.ids_T[place])
        rest = math.log(max(1 - _mass(logs), math.exp(LEAST)))  # upper bound for a token outside the entries
        scores.logprobs_T[place] = logs[ids.index(own)] if own in ids else rest
    return scores


MOST = 1e-3
"""The tolerance for rounding: by how much a log-probability may be above 0, or a sum of probabilities above 1."""
LEAST = -60.0
"""The smallest log-probability of an entry; smaller values and minus infinity are raised to it."""


def _mass(logs: Sequence[float]) -> float:
    """Return the sum of the probabilities whose logarithms are ``logs``."""
    return sum(math.exp(max(each, LEAST)) for each in logs)


def _make_misaligned_teacher_error(words: str) -> RowProblem:
    """Return the error of a row whose teacher columns do not match its tokens; ``words`` describe the mismatch."""
    return RowProblem(
        "no_teacher",
        f"teacher_ids and teacher_logprobs {words}",
        remedy="give for every token of input_ids the teacher's likeliest entries and their log-probabilities, as many "
        "for each; [] where labels has -100 and for the first token",
    )


def _token_ids(value: Any, name: str) -> list[int]:
    """Return the token ids in the column ``name``, a list or its JSON. Raises :class:`RowProblem` for another value."""
    found = _decode_cell(value)
    whole = isinstance(found, list) and found and all(type(each) is int and 0 <= each < 2**31 for each in found)
    if not whole:
        raise RowProblem("no_tokens", f"{name} is no list of token ids", remedy="give a list of whole numbers")
    assert isinstance(found, list)
    return found


def _text(value: Any, name: str) -> str:
    """Return the text in the column ``name``. Raises :class:`RowProblem` if it is empty or not a text."""
    if not isinstance(value, str) or not value:
        words = "empty" if value == "" else f"a {type(value).__name__}"
        raise RowProblem("no_text", f"{name} is {words}", remedy=f"give {name} as text, or the whole row as messages")
    return value


def _messages(value: Any, name: str) -> Messages:
    """Return the messages in the column ``name``, a list or its JSON, without keys whose value is ``None``. Raises
    :class:`RowProblem` for another value."""
    found = _decode_cell(value)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise RowProblem("no_messages", f"{name} is no list of messages", remedy='[{"role": "user", "content": "..."}]')
    wrong = next((each for each in found if not isinstance(each.get("role"), str)), None)
    if wrong is not None:
        raise RowProblem("no_messages", f"{name} has a message without a role: {str(wrong)[:60]}", remedy="add it")
    # Parquet gives every message the keys of all of them
    return [{key: part for key, part in each.items() if part is not None or key == "content"} for each in found]


def _tools(row: Mapping[str, Any]) -> Any:
    """Return the tool descriptions of a row for the chat template; ``None`` if it has none."""
    return _decode_cell(row["tools"]) or None if "tools" in row else None


def _decode_cell(value: Any) -> Any:
    """Return the content of a cell. Text that is valid JSON is decoded, because cells of CSV files store lists as JSON;
    any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _common_prompt(row: Mapping[str, Any]) -> Messages:
    """Return the messages with which both conversations of a pair begin; for a single answer, all messages but the
    last. Raises :class:`RowProblem` if there are none, or if the row also has a text prompt that is not among these
    messages."""
    names = [name for name in ("chosen", "rejected") if name in row]
    conversations = [_messages(row[name], name) for name in names]
    first, other = conversations[0], conversations[-1]
    # with a single labelled answer, the last turn is the answer
    same = len(first) - 1 if len(names) == 1 else 0
    while len(names) > 1 and same < min(len(first), len(other)) and first[same] == other[same]:
        same += 1
    if not same:
        raise RowProblem(
            "no_prompt",
            f"{' and '.join(names)} begin with different messages: they are no answers to one prompt",
            remedy="give prompt as messages, or conversations that begin alike",
        )
    prompt = row.get("prompt")
    if prompt and all(prompt != message.get("content") for message in first[:same]):
        raise RowProblem(
            "no_prompt",
            f"prompt is text ({str(prompt)[:30]!r}) that no message before the answers has",
            remedy="give prompt as messages too, or leave it out",
        )
    return first[:same]


def _refuse_other_turns(answer: Messages, name: str) -> None:
    """Raise :class:`RowProblem` for an answer that has no messages, or whose first or last message is not the
    assistant's. ``name`` is the column of the answer (``chosen`` or ``rejected``)."""
    role = next((turn["role"] for turn in (*answer[:1], *answer[-1:]) if turn["role"] != "assistant"), None)
    if not answer or role is not None:
        what = "ends with the prompt" if role is None else f"begins or ends with a turn of {role!r}"
        raise RowProblem(
            "no_assistant_turn",
            f"the answer {name} {what}, and only the assistant's turns are learned from",
            remedy="let the two answers begin and end with a turn of the assistant, after the same prompt",
        )


def _make_same_answers_error() -> RowProblem:
    """Return the error of a pair whose two answers are equal."""
    return RowProblem(
        "same_answers", "chosen and rejected are the same: there is nothing to prefer", remedy="remove the row"
    )


def _make_missing_columns_error(row: Mapping[str, Any], expected: str) -> RowProblem:
    """Return the error of a row that lacks columns; ``expected`` names the required columns."""
    return RowProblem(
        "no_columns",
        f"it has the columns {', '.join(map(str, row))}, and needs {expected}",
        remedy="rename them with data.columns = { completion = 'answer' }",
    )
