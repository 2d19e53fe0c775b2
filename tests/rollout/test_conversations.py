"""Conversations: what was sampled is extended as it was sampled, or a branch begins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import BudgetSpent, EpisodeError
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool, ToolCall
from headrace.base.types.episode import EpisodeGraph, StopReason
from headrace.base.types.scored import paths
from headrace.rollout import Conversations, EpisodeLimits
from tests.rollout.models import conversations, render_text, tokenizer

ADD = Tool(name="add", description="Adds.", parameters={"type": "object"})


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def ask(talk: Conversations, *messages: Message, tools: tuple[Tool, ...] = (), **options: Any) -> Reply:
    return asyncio.run(talk.reply(messages, tools, ChatOptions(**options)))


def leaf_texts(talk: Conversations) -> list[str]:
    episode = EpisodeGraph(key=talk.key, turns=talk.turns)
    return [render_text(talk, episode.path(leaf)) for leaf in episode.leaves()]


def test_a_conversation_that_goes_on_is_one_path_with_what_the_template_adds_in_between() -> None:
    talk = conversations(lambda text: "yes" if "again" in text else "no")
    first = ask(talk, user("well"))
    second = ask(talk, user("well"), first.message, user("again"))
    assert (first.message.content, second.message.content) == ("no", "yes")
    assert [turn.author for turn in talk.turns] == ["task", "policy", "user", "policy"]
    assert [turn.parent for turn in talk.turns] == [None, 0, 1, 2]
    assert leaf_texts(talk) == [
        "<|im_start|>user\nwell<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    ]


def test_an_answer_that_was_cut_off_gets_the_end_that_it_did_not_sample_as_given_tokens() -> None:
    talk = conversations(lambda text: "no…")
    first = ask(talk, user("well"))
    ask(talk, user("well"), first.message, user("again"))
    assert first.stop_reason is StopReason.LENGTH
    end, *_ = talk.turns[2].tokens.ids_T.tolist()
    assert end == tokenizer().eos_token_id
    assert not talk.turns[2].tokens.sampled_T.any()


def test_the_first_tokens_are_those_of_the_rendered_prompt() -> None:
    talk = conversations(lambda text: "no")
    ask(talk, Message(role="system", content="be brief"), user("well"))
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "well"}]
    text = tokenizer().apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert talk.turns[0].tokens.ids_T.tolist() == tokenizer().encode(text, add_special_tokens=False)


def test_an_edited_answer_begins_a_branch_where_the_conversations_part() -> None:
    talk = conversations(lambda text: f"n{text.count('assistant')}")
    one = ask(talk, user("a"))
    two = ask(talk, user("a"), one.message, user("b"))
    ask(talk, user("a"), one.message, user("b"), said("no, this"), user("c"))
    assert [turn.parent for turn in talk.turns] == [None, 0, 1, 2, 1, 4]
    assert two.turn == 3
    assert "no, this" in render_text(talk, [4])
    ask(talk, user("a"), said("no, that"), user("b"))
    assert talk.turns[6].parent is None


def test_a_compacted_history_starts_a_root_of_its_own() -> None:
    talk = conversations(lambda text: "ok")
    one = ask(talk, user("a"))
    ask(talk, user("a"), one.message, user("b"))
    ask(talk, user("in short: a, b"))
    assert [turn.parent for turn in talk.turns] == [None, 0, 1, 2, None, 4]


def test_the_same_question_asked_twice_is_answered_twice_below_one_turn() -> None:
    talk = conversations(lambda text: "ok")
    ask(talk, user("a"))
    ask(talk, user("a"))
    assert [turn.parent for turn in talk.turns] == [None, 0, 0]


def test_twin_threads_with_equal_answers_go_on_each_by_itself() -> None:
    talk = conversations(lambda text: "ok")
    one, two = ask(talk, user("a")), ask(talk, user("a"))
    third = ask(talk, user("a"), one.message, user("b"))
    fourth = ask(talk, user("a"), two.message, user("c"))
    assert one.message == two.message
    assert {talk.turns[talk.turns[r.turn].parent or 0].parent for r in (third, fourth)} == {one.turn, two.turn}


def test_questions_at_once_hang_beside_each_other() -> None:
    talk = conversations(lambda text: "ok")

    async def both() -> None:
        await asyncio.gather(*(talk.reply([user("a")]) for _ in range(3)), talk.reply([user("b")]))

    asyncio.run(both())
    assert sorted(turn.author for turn in talk.turns) == ["policy"] * 4 + ["task"] * 2
    assert len({turn.tokens.ids_T.tobytes() for turn in talk.turns if turn.author == "task"}) == 2


def test_other_tools_are_another_conversation() -> None:
    talk = conversations(lambda text: "ok")
    ask(talk, user("a"))
    ask(talk, user("a"), tools=(ADD,))
    assert [turn.parent for turn in talk.turns] == [None, 0, None, 2]


def test_a_call_spelled_otherwise_is_the_same_call_and_its_tokens_stay() -> None:
    talk = conversations(lambda text: 'so <tool_call>{"name": "add", "arguments": {"a":1,"b":2}}</tool_call>')
    reply = ask(talk, user("a"), tools=(ADD,))
    (call,) = reply.message.tool_calls
    assert (reply.message.content, call.name, call.id) == ("so", "add", "call_1_0")
    again = Message(
        role="assistant", content="so", tool_calls=(ToolCall(id=call.id, name="add", arguments='{"b": 2, "a": 1}'),)
    )
    answer = Message(role="tool", content="3", tool_call_id=call.id, name="add")
    ask(talk, user("a"), again, answer, tools=(ADD,))
    assert [turn.author for turn in talk.turns] == ["task", "policy", "tool", "policy"]
    assert "<tool_call>" not in render_text(talk, [2])


def test_reasoning_is_kept_apart_and_may_be_left_out_of_the_history() -> None:
    talk = conversations(lambda text: "<think>hm</think>ok")
    reply = ask(talk, user("a"))
    assert (reply.message.reasoning, reply.message.content) == ("hm", "ok")
    ask(talk, user("a"), said("ok"), user("b"))
    ask(talk, user("a"), reply.message, user("c"))
    assert [turn.parent for turn in talk.turns] == [None, 0, 1, 2, 1, 4]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a":</tool_call>', "a call that is not JSON"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "arguments that are not an object"),
        ('<tool_call>{"name": 7}</tool_call>', "a call without a name"),
        ('<tool_call>{"name": "add"', "a call without an end"),
    ],
)
def test_a_malformed_call_is_text_and_counted(text: str, problem: str) -> None:
    notes: list[str] = []
    reply = ask(conversations(lambda _: text, notes=notes), user("a"), tools=(ADD,))
    assert (reply.message.content, reply.message.tool_calls) == (text, ())
    assert notes == [f"an answer holds {problem}: it is taken as text"]


def test_a_model_whose_template_knows_no_tools_is_told_in_words_and_answers_in_json() -> None:
    template = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = conversations(lambda text: '{"name": "add", "arguments": {"a": 1}}', template=template)
    reply = ask(talk, user("a"), tools=(ADD,))
    assert '"name": "add"' in render_text(talk, [0])
    assert [call.arguments for call in reply.message.tool_calls] == ['{"a": 1}']
    ask(talk, user("a"), reply.message, Message(role="tool", content="3", name="add"), tools=(ADD,))
    assert "Answer of add: 3" in render_text(talk, [2])


def test_stop_strings_end_the_content_and_are_told() -> None:
    reply = ask(conversations(lambda text: "one END"), user("a"), stop=("END", "z"))
    assert (reply.message.content, reply.stop) == ("one ", "END")


def test_what_is_sampled_otherwise_than_the_run_samples_carries_no_loss() -> None:
    talk = conversations(lambda text: "ok")
    ask(talk, user("a"), temperature=0.0)
    ask(talk, user("b"), temperature=1.0, agent="judge")
    assert [turn.untrained for turn in talk.turns if turn.stop_reason] == ["other_sampling", ""]
    assert talk.turns[-1].author == "judge"


def test_budgets_end_an_episode_by_their_names() -> None:
    talk = conversations(lambda text: "ok", EpisodeLimits(max_turns=1))
    ask(talk, user("a"))
    with pytest.raises(BudgetSpent, match=r"env.max_turns") as spent:
        ask(talk, user("b"))
    assert spent.value.reason == "max_turns"
    assert len(talk.turns) == 2


def test_the_last_answer_of_a_token_budget_is_cut_to_what_is_left() -> None:
    talk = conversations(lambda text: "abcdef", EpisodeLimits(max_tokens=10))
    assert [ask(talk, user(text)).num_tokens for text in "ab"] == [7, 3]
    with pytest.raises(BudgetSpent) as spent:
        ask(talk, user("c"))
    assert spent.value.reason == "max_tokens"


def test_a_conversation_that_ends_with_an_answer_is_answered_once_more() -> None:
    talk = conversations(lambda text: "ok")
    first = ask(talk, user("a"))
    ask(talk, user("a"), first.message)
    assert render_text(talk, [0, 1, 2]).endswith("ok<|im_end|>\n<|im_start|>assistant\n")


def test_questions_at_once_share_the_token_budget() -> None:
    talk = conversations(lambda text: "abcdef", EpisodeLimits(max_tokens=10))

    async def both() -> list[Any]:
        return await asyncio.gather(*(talk.reply([user(t)]) for t in "abc"), return_exceptions=True)

    outcomes = asyncio.run(both())
    assert sum(r.num_tokens for r in outcomes if isinstance(r, Reply)) <= 10


def test_the_context_bounds_prompt_and_answer_together() -> None:
    talk = conversations(lambda text: "abcdef", EpisodeLimits(max_context=30))
    reply = ask(talk, user("a"))
    assert reply.num_prompt_tokens + reply.num_tokens <= 30
    with pytest.raises(BudgetSpent) as spent:
        ask(talk, user("a"), reply.message, user("b" * 40))
    assert spent.value.reason == "max_context"


def test_text_that_could_never_fit_is_refused_untokenised_and_long_text_keeps_nobody_waiting() -> None:
    talk = conversations(lambda text: "ok", EpisodeLimits(max_context=1 << 20))
    with pytest.raises(BudgetSpent, match="messages of 67108864 characters"):
        ask(talk, user("a" * (64 << 20)))

    async def both() -> tuple[Reply, Reply]:
        long = asyncio.ensure_future(talk.reply([user("a" * (1 << 18))]))
        await asyncio.sleep(0)
        short = await talk.reply([user("b")])
        assert not long.done()
        return await long, short

    long, short = asyncio.run(both())
    assert long.num_prompt_tokens > 1 << 18
    assert short.turn < long.turn


def test_too_many_calls_end_an_episode() -> None:
    text = '<tool_call>{"name": "add"}</tool_call>' * 2
    talk = conversations(lambda _: text, EpisodeLimits(max_tool_calls=1))
    reply = ask(talk, user("a"), tools=(ADD,))
    with pytest.raises(BudgetSpent) as spent:
        ask(talk, user("a"), reply.message, Message(role="tool", content="3"), tools=(ADD,))
    assert spent.value.reason == "max_tool_calls"


def test_counting_reads_what_an_answer_would_and_keeps_nothing() -> None:
    talk = conversations(lambda text: "ok")
    first = ask(talk, user("a"))
    more = (user("a"), first.message, user("b"))
    count = asyncio.run(talk.count(more))
    assert len(talk.turns) == 2
    assert ask(talk, *more).num_prompt_tokens == count


def test_a_template_that_refuses_is_the_episodes_failure() -> None:
    talk = conversations(lambda text: "ok", template="{{ raise_exception('no') }}")
    with pytest.raises(EpisodeError, match="the chat template refuses") as refused:
        ask(talk, user("a"))
    assert refused.value.reason == "template_error"


def test_a_template_that_wants_a_call_before_its_answer_is_served() -> None:
    strict = (
        "{%- for m in messages %}{% if m.role == 'tool' "
        "and not (loop.previtem.tool_calls or loop.previtem.role == 'tool') %}"
        "{{ raise_exception('an answer without a call') }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{% endfor %}"
        "{%- if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}{# tools #}"
    )
    talk = conversations(lambda text: '<tool_call>{"name": "add"}</tool_call>', template=strict)
    first = ask(talk, user("a"), tools=(ADD,))
    tool = Message(role="tool", content="3", tool_call_id=first.message.tool_calls[0].id)
    ask(talk, user("a"), first.message, tool, tools=(ADD,))
    assert render_text(talk, [2]) == "[tool]3"


def test_tokens_continue_what_they_begin_with() -> None:
    talk = conversations(lambda text: "ok")
    ids = tokenizer().encode("well", add_special_tokens=False)
    first = asyncio.run(talk.sample(ids))
    asyncio.run(talk.sample(ids))
    more = [*ids, *first.token_ids, *tokenizer().encode("so", add_special_tokens=False)]
    asyncio.run(talk.sample(more))
    assert [turn.parent for turn in talk.turns] == [None, 0, 0, 1, 3]
    assert talk.turns[3].tokens.ids_T.tolist() == more[len(ids) + len(first.token_ids) :]


# --- any tree of conversations --------------------------------------------------------------------------------------

WORDS = st.text("abc ?", min_size=1, max_size=5)
MOVES = st.one_of(
    st.tuples(st.just("continue"), WORDS),
    st.tuples(st.just("ask again"), st.just("")),
    st.tuples(st.just("edit"), WORDS),
    st.tuples(st.just("cut"), WORDS),
    st.tuples(st.just("begin"), WORDS),
)


def moved(history: list[Message], move: str, text: str, place: int) -> list[Message]:
    """The messages that are sent next, by somebody who has ``history`` (ending with an answer)."""
    match move:
        case "continue":
            return [*history, user(text)]
        case "ask again":
            return history[:-1]
        case "edit":
            at = place % len(history)
            changed = Message(role=history[at].role, content=history[at].content + "x")
            return [*history[:at], changed, *history[at + 1 :], user(text)]
        case "cut":
            return [*history[: 2 * (place % (len(history) // 2 + 1))], user(text)]
    return [user(text)]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(MOVES, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12), st.booleans())
def test_any_tree_of_conversations_reads_as_rendered_and_trains_every_sampled_token_once(
    moves: list[tuple[tuple[str, str], int, int]], cut_off: bool
) -> None:
    talk = conversations(lambda text: f"w{len(text) % 7}" + ("…" if cut_off and len(text) % 2 else ""))
    held: list[list[Message]] = []
    for (move, text), who, place in moves:
        history = held[who % len(held)] if held else []
        sent = moved(history, move, text, place) if history else [user(text)]
        before = len(talk.turns)
        reply = ask(talk, *sent)
        held.append([*sent, reply.message])
        plain = [{"role": m.role, "content": m.content} for m in sent]
        whole = tokenizer().apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        path = EpisodeGraph(key=talk.key, turns=talk.turns).path(reply.turn)
        assert render_text(talk, path[:-1]) == whole  # the reference: the whole conversation as text
        assert len(talk.turns) - before <= 2
    episode = EpisodeGraph(key=talk.key, turns=talk.turns)
    trained: list[tuple[float, int]] = []
    for sample in paths(episode, 1.0):
        assert not (sample.mask_T & ~sample.tokens.sampled_T).any()
        trained += [(float(lp), place) for place, lp in enumerate(sample.tokens.logprobs_T) if sample.mask_T[place]]
    assert len(trained) == episode.num_sampled  # every one of them,
    assert len(set(trained)) == len(trained)  # once
