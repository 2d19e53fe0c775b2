"""The page of one episode: its rewards, the graph of its turns, and every token with its logprob.

An *episode* is one attempt at a task: a tree of *turns*, each of contiguous tokens by one author. A turn is *sampled*
if the policy wrote it, otherwise *given*. The functions return HTML text. Shape legend: T tokens of one turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.base.types.episode import EpisodeGraph, Turn
from headrace.run.observe.pages.html import figure, page, text
from headrace.run.observe.words import plural

MAX_TOKENS = 50_000
"""The number of tokens of an episode that are shown one by one. Later turns are shown as plain text."""
_MAX_CHARACTER_TOKENS = 8
"""The maximum number of tokens that may encode one character together."""
_LEVELS = ((0.9, ""), (0.5, "l1"), (0.1, "l2"), (0.01, "l3"))
"""The style classes of a token's colour, each with the smallest probability for which it is used, from likely (no
colour) to unlikely."""
_STEP, _COLUMN = 26, 22
"""The distances in pixels between two turns of the graph, and between two columns."""

Decode = Callable[[Sequence[int]], str]
"""A function from token ids to their text, special tokens included."""


def make_episode_page(episode: EpisodeGraph, row: dict[str, Any], decode: Decode) -> str:
    """Return the whole HTML page of ``episode``, an episode of an evaluation: its figures, the ``row`` of its task, the
    graph of its turns, and the text of each turn. ``decode`` converts token ids to text."""
    key = f"task {episode.key.group + 1}, attempt {episode.key.place + 1}"
    tokens_left = MAX_TOKENS
    turns: list[str] = []
    for index, turn in enumerate(episode.turns):
        turns.append(_format_turn(index, turn, decode, by_token=tokens_left > 0))
        tokens_left -= len(turn.tokens)
    body = [
        f"<p class='brand'><a href='../index.html'>headrace eval</a></p><h1>{text(key)}</h1>",
        _format_cards(episode),
        f"<section><h2>Row</h2><pre>{text(_as_json(row), 20_000)}</pre></section>",
        _draw_graph(episode) if episode.turns else "<section>It has no turns.</section>",
        *turns,
        "<p class='faint'>Sampled tokens are coloured by how likely they were: none ≥ 90 %, then ≥ 50 %, ≥ 10 %, "
        "≥ 1 %, less. Hold the pointer over one for its number, logprob and version.</p>",
    ]
    return page(f"{key} · headrace", "\n".join(body))


def _as_json(row: dict[str, Any]) -> str:
    """Return ``row``, the data of a task, as indented JSON; if a value has no JSON form, return ``str(row)``."""
    try:
        return msgspec.json.format(msgspec.json.encode(row), indent=2).decode()
    except (TypeError, ValueError, OverflowError):
        return str(row)


def _format_cards(episode: EpisodeGraph) -> str:
    """Return the figures at the top of an episode's page as HTML: reward, status, numbers of tokens and turns, parts of
    the reward, and values that reward functions logged."""
    sampled = [turn for turn in episode.turns if turn.stop_reason is not None]
    branches = len(episode.leaves())
    cards = [
        ("reward", figure(episode.reward), ""),
        ("status", str(episode.status), episode.cause),
        ("sampled tokens", f"{episode.num_sampled:,}", f"in {len(sampled)} answer{'' if len(sampled) == 1 else 's'}"),
        ("turns", f"{len(episode.turns)}", f"{branches} branches" if branches > 1 else ""),
        *((name, figure(value), "part of the reward") for name, value in episode.parts.items()),
        *((name, figure(value), "reward of the agent") for name, value in episode.agent_rewards.items()),
        *((name, str(value), "logged by a reward") for turn in sampled for name, value in turn.extra.items()),
    ]
    shown = (
        f"<div><dt>{text(label, 80)}</dt><dd>{text(value, 80)}<small>{text(words, 2000)}</small></dd></div>"
        for label, value, words in cards
    )
    return f"<dl class='cards'>{''.join(shown)}</dl>"


def _assign_columns(turns: Sequence[Turn]) -> list[int]:
    """Return for each turn the column of the graph in which it is drawn, from 0. The first turn that continues a parent
    stays in the column of its parent; every other turn, such as a branch, opens a new column."""
    columns: list[int] = []
    continued: set[int] = set()
    num_columns = 0
    for turn in turns:
        if turn.parent is not None and turn.parent not in continued:
            columns.append(columns[turn.parent])
            continued.add(turn.parent)
        else:
            columns.append(num_columns)
            num_columns += 1
    return columns


def _draw_graph(episode: EpisodeGraph) -> str:
    """Return the graph of the turns as an SVG picture in HTML: from top to bottom in the order of the turns, with
    branches side by side. Each point links to the section of its turn. The episode must have a turn."""
    columns = _assign_columns(episode.turns)
    points = [(14 + _COLUMN * column, 16 + _STEP * index) for index, column in enumerate(columns)]
    left = 28 + _COLUMN * max(columns)
    lines, marks = [], []
    for index, (turn, (x, y)) in enumerate(zip(episode.turns, points, strict=True)):
        if turn.parent is not None:
            x0, y0 = points[turn.parent]
            lines.append(f"<path d='M{x0} {y0} C{x0} {y0 + _STEP}, {x} {y - _STEP}, {x} {y}'/>")
        kind = "sampled" if turn.stop_reason is not None else "given"
        words = f"{index} · {turn.author} · {plural(len(turn.tokens), 'token')}"
        earned = f" · {figure(turn.reward)}" if turn.reward is not None else ""
        marks.append(
            f"<a href='#turn-{index}'><circle class='{kind}' cx='{x}' cy='{y}' r='6'/>"
            f"<text x='{left}' y='{y + 5}'>{text(words + earned, 200)}</text></a>"
        )
    height = 32 + _STEP * (len(points) - 1)
    return (
        "<section><h2>Turns</h2><div class='wide'>"
        f"<svg role='img' aria-label='graph of turns' width='{left + 480}' height='{height}'>"
        f"{''.join(lines)}{''.join(marks)}</svg></div></section>"
    )


def _format_turn(index: int, turn: Turn, decode: Decode, *, by_token: bool) -> str:
    """Return the HTML section of ``turn``, which has the number ``index``: its author, facts about it, and its text by
    ``decode``. With ``by_token``, a sampled turn shows each token in the colour of its probability; else the text has
    no colours."""
    facts = [plural(len(turn.tokens), "token")]
    facts += [f"continues {turn.parent}"] if turn.parent is not None else []
    facts += [f"ended by {turn.stop_reason}"] if turn.stop_reason is not None else []
    facts += [f"earned {figure(turn.reward)}"] if turn.reward is not None else []
    facts += [f"process reward {figure(turn.process)}"] if turn.process is not None else []
    facts += [f"branch {turn.branch.number} of pivot {turn.branch.pivot}"] if turn.branch is not None else []
    facts += [f"carries no loss: {turn.untrained}"] if turn.untrained else []
    facts += ["an error"] if turn.failed else []
    ids = turn.tokens.ids_T.tolist()
    content = "".join(_format_tokens(turn, decode)) if by_token and turn.stop_reason is not None else text(decode(ids))
    return (
        f"<section id='turn-{index}'><h2>{index} · {text(turn.author, 200)}</h2>"
        f"<p class='faint'>{text(' · '.join(facts), 1000)}</p><pre>{content}</pre></section>"
    )


def _format_tokens(turn: Turn, decode: Decode) -> Iterator[str]:
    """Yield the tokens of ``turn``, which was sampled, as HTML elements with the text by ``decode``, coloured by
    probability, each with its id, logprob and version as a tooltip. Several tokens that encode one character together
    are one element, with the colour of the least likely token."""
    ids, tokens = turn.tokens.ids_T.tolist(), turn.tokens
    start = 0
    for end in range(1, len(ids) + 1):
        decoded = decode(ids[start:end])
        # the replacement character means that the bytes of a character are not complete: add the next token
        if "\ufffd" in decoded and end - start < _MAX_CHARACTER_TOKENS and end < len(ids):
            continue
        lowest_logprob = float(tokens.logprobs_T[start:end].min())
        details = ", ".join(
            f"{ids[index]}: logprob {float(tokens.logprobs_T[index]):.4g}, version {int(tokens.versions_T[index])}"
            for index in range(start, end)
        )
        yield f"<span class='{_choose_color(lowest_logprob)}' title='{text(details)}'>{text(decoded)}</span>"
        start = end


def _choose_color(logprob: float) -> str:
    """Return the style class of the colour for a token with this logprob, by :data:`_LEVELS`; ``l4`` for the least
    likely tokens, and ``lx`` for a logprob that is not finite."""
    if not math.isfinite(logprob):
        return "lx"
    return next((color for probability, color in _LEVELS if logprob >= math.log(probability)), "l4")
