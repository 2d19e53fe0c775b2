"""The JSON answers to the dashboard's requests about episodes: the list, one episode with the graph of its turns, and
windows of its tokens.

The log-probabilities of the learner and of teachers are read from two sources:

    a teacher with an engine                 ··▶ columns of the turns, recorded before the step
    the learner, a teacher in its process    ··▶ columns recorded by the step that trained the episode

Shape legend: T tokens of one turn, W tokens of the displayed window, R tokens with recorded routing, L layers, K
experts of a token in one layer. π is the learner's policy, μ the policy that sampled, ν a teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.clock import Clock
from headrace.base.errors import DataError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, Turn
from headrace.base.types.recorded import Routing
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn, find_version_range
from headrace.base.types.versions import NOT_SAMPLED
from headrace.flow.ledger.browse import ORDERS, Browser, EpisodeQuery, EpisodeRow
from headrace.wings.view.columns import with_columns
from headrace.wings.view.credit import EpisodeAdvantages
from headrace.wings.view.run import OpenRun

PAGE = 50
MOST_PAGE = 500
MOST_WINDOW = 4096
MOST_KEPT = 64
"""Largest number of entries of a kept-set, or of a teacher's distribution, that are listed."""
PREVIEW_TOKENS = 160
"""Number of tokens in the preview of a turn on the page of an episode."""
EXCERPT_TOKENS = 48
EXCERPT = 96
"""Length in characters of the excerpt of a prompt or an answer in the list, taken from ``EXCERPT_TOKENS`` tokens."""
SEARCH_S = 0.6
"""Longest time in seconds that one search request reads; the next request continues where it stopped."""
MOST_FOUND = 25
"""Largest number of episodes that one search request returns."""
BLOCK = 64
"""Number of episodes that a search reads from the ledger at once."""
MOST_DIGITS = 18
"""Largest number of digits of a number in a request, so that it fits into 64 bits."""


def list_episodes(run: OpenRun, parameters: dict[str, str]) -> dict[str, Any]:
    """Return one page of the list of episodes of ``run``, with excerpts of their texts, and the total number of
    episodes that match the filter. ``parameters`` are the parameters of the request: ``order``, ``offset``, ``limit``,
    and the conditions of the filter. Raises :class:`~headrace.base.errors.DataError` for an invalid value."""
    order = parameters.pop("order", "newest")
    if order not in ORDERS:
        raise DataError(f"order={order!r} is none", remedy=f"known: {', '.join(ORDERS)}")
    offset, limit = (_parse_number(parameters, name, default) for name, default in (("offset", 0), ("limit", PAGE)))
    query = _parse_query(parameters)
    browser = run.browser()
    rows = browser.page(query, order=order, offset=offset, limit=min(limit, MOST_PAGE))
    return {
        "rows": [_encode_row(row) | _make_excerpts(run, browser, row) for row in rows],
        "total": run.cached(f"count {query}", lambda: browser.count(query)),
        "running": browser.num_running(),
        "offset": offset,
    }


def search_episodes(run: OpenRun, clock: Clock, words: str, before: str) -> dict[str, Any]:
    """Search the episodes of ``run`` for the text ``words``, ignoring case, from the latest episode backwards for at
    most :data:`SEARCH_S` on ``clock``, and return the matches. The field ``next`` of the answer is the key of the last
    episode that was read, empty if the search is complete; ``before`` is the ``next`` of the previous answer, empty to
    begin with the latest episode."""
    needle, until_s = words.casefold(), clock.now() + SEARCH_S
    found: list[dict[str, Any]] = []
    read = 0
    for episode in _iterate_backwards(run.browser(), _parse_key(before) if before else None):
        read += 1
        place = _find_match(run, episode, needle)
        found += [] if place is None else [place]
        if len(found) == MOST_FOUND or clock.now() > until_s:
            return {"found": found, "read": read, "next": str(episode.key)}
    return {"found": found, "read": read, "next": ""}


def _iterate_backwards(browser: Browser, before: EpisodeKey | None) -> Iterator[EpisodeGraph]:
    """Yield every episode that comes before the episode ``before`` (``None``: every episode), the latest first."""
    while block := browser.episodes_before(before, BLOCK):
        yield from block
        before = block[-1].key


def read_episode(run: OpenRun, advantage_cache: EpisodeAdvantages, name: str) -> dict[str, Any]:
    """Return one episode of ``run`` for its page: its record in the ledger, the records of all episodes of its group,
    and its turns without their tokens. ``name`` is the key ``GROUP.PLACE``, and ``advantage_cache`` computes the
    advantages. Raises :class:`~headrace.base.errors.DataError` if there is no such episode."""
    key = _parse_key(name)
    episode = run.browser().episode(key)
    if episode is None:
        raise DataError(f"there is no episode {key} that has ended", remedy="choose one from the list")
    episode = with_columns(episode, run.directory)
    siblings = run.browser().page(EpisodeQuery(group=key.group), order="oldest", limit=MOST_PAGE)
    row = next(each for each in siblings if each.place == key.place)
    advantages, why = advantage_cache.find(run, episode, row)
    differing = count_routing_differences(episode)
    recorded = TeacherColumns.read(run, episode)
    if advantage_cache.has_teacher_term(run) and not recorded.teacher_scores:
        advantages, why = None, f"a teacher adds to it, and of that: {explain_missing_teacher(run, row.step)}"
    turns = [
        _encode_turn(run, index, turn, advantages, None if differing is None else differing[index])
        | {"gap": max_abs(recorded.gaps.get(index))}
        | _teacher_summary(advantage_cache, run, episode, recorded, index)
        for index, turn in enumerate(episode.turns)
    ]
    return {
        **_encode_row(row),
        "turns": turns,
        "siblings": [_encode_row(each) for each in siblings],
        "advantage_why": why,
        "teacher_why": "" if recorded.teacher_scores else explain_missing_teacher(run, row.step),
        "words_problem": run.words.problem,
        "agent_rewards": episode.agent_rewards,
    }


def _teacher_summary(
    advantage_cache: EpisodeAdvantages, run: OpenRun, episode: EpisodeGraph, recorded: TeacherColumns, turn: int
) -> dict[str, Any]:
    """Return a summary of what teachers computed for turn number ``turn``: the name of the teacher, the largest |log ν
    − log μ|, the number of entries per token, and the range of the term that the teacher adds to the advantage."""
    teacher_scores, gaps_T = recorded.teacher_scores.get(turn), recorded.teacher_gaps(episode, turn)
    added_T = advantage_cache.teacher_term(run, gaps_T)
    return {
        "teacher": episode.turns[turn].teacher,
        "teacher_gap": max_abs(gaps_T),
        "teacher_entries": 0 if teacher_scores is None else teacher_scores.ids_TK.shape[1],
        "teacher_adds": None
        if teacher_scores is None or added_T is None
        else _find_range(added_T[teacher_scores.known_T]),
    }


def read_window(
    run: OpenRun, advantage_cache: EpisodeAdvantages, name: str, turn: int, span: tuple[int, int]
) -> dict[str, Any]:
    """Return the recorded values of some tokens of turn number ``turn`` of the episode ``name`` of ``run``, as columns
    with one element per token: up to ``span[1]`` tokens, beginning with token ``span[0]``. Columns that were not
    recorded are left out. ``advantage_cache`` computes the teacher's term of the advantages."""
    first, count = span
    episode, held = _find_turn(run, name, turn)
    tokens = held.tokens
    last = min(len(tokens), first + min(count, MOST_WINDOW))
    shown_W = tokens.ids_T[first:last]
    columns: dict[str, Any] = {
        "first": first,
        "total": len(tokens),
        "text": run.words.pieces(tokens.ids_T.tolist(), first, last) if last > first else [],
        "id": shown_W.tolist(),
        "version": tokens.versions_T[first:last].tolist(),
        "logprob": [_replace_non_finite(value) for value in tokens.logprobs_T[first:last].tolist()],
    }
    if tokens.kept is not None:
        columns["kept"] = tokens.kept.sizes_T[first:last].tolist()
    if tokens.entropies_T is not None:
        columns["entropy"] = [_replace_non_finite(value) for value in tokens.entropies_T[first:last].tolist()]
    recorded = run.cached(f"recorded {name}", lambda: TeacherColumns.read(run, episode))
    if turn in recorded.gaps:
        columns["gap"] = [_replace_non_finite(value) for value in recorded.gaps[turn][first:last].tolist()]
    if (teacher_scores := recorded.teacher_scores.get(turn)) is not None:
        columns["teacher"] = [_replace_non_finite(value) for value in teacher_scores.logprobs_T[first:last].tolist()]
        columns["teacher_version"] = teacher_scores.versions_T[first:last].tolist()
    if (added_T := advantage_cache.teacher_term(run, recorded.teacher_gaps(episode, turn))) is not None:
        columns["teacher_adds"] = added_T[first:last].tolist()
    differing = count_routing_differences(episode)
    again_T = None if differing is None else differing[turn]
    if again_T is not None:
        columns["rerouted"] = again_T[first:last].tolist()
    return columns


def read_token(run: OpenRun, name: str, turn: int, index: int) -> dict[str, Any]:
    """Return the further records of token number ``index`` of turn number ``turn`` of the episode ``name`` of ``run``:
    its kept-set as text, its experts by layer, and its teacher's distribution; what was not recorded is left out.
    Raises :class:`~headrace.base.errors.DataError` if there is no such token."""
    _, held = _find_turn(run, name, turn)
    tokens = held.tokens
    if not 0 <= index < len(tokens):
        raise DataError(f"turn {turn} has no token {index}", remedy=f"it has {len(tokens)}")
    detail: dict[str, Any] = {"place": index}
    if tokens.kept is not None and tokens.kept.sizes_T[index]:
        ids = tokens.kept[index : index + 1].ids_E.tolist()
        detail["kept"] = [{"id": each, "text": run.words.pieces([each])[0]} for each in ids[:MOST_KEPT]]
        detail["kept_more"] = max(0, len(ids) - MOST_KEPT)
    if tokens.routing is not None and tokens.routing.known_T[index]:
        detail["experts"] = tokens.routing[index : index + 1].experts_RLK[0].tolist()
    if tokens.teacher_scores is not None and tokens.teacher_scores.known_T[index]:
        teacher_scores = zip(
            tokens.teacher_scores.ids_TK[index].tolist(), tokens.teacher_scores.logs_TK[index].tolist(), strict=True
        )
        detail["teacher"] = [
            {"id": each, "text": run.words.pieces([each])[0], "logprob": log}
            for each, log in list(teacher_scores)[:MOST_KEPT]
        ]
    return detail


def count_routing_differences(episode: EpisodeGraph) -> list[npt.NDArray[np.int64] | None] | None:
    """Return how often the routing of the tokens of ``episode`` changed when a later turn read them as context. For
    each turn and each of its tokens, the result has the number of the token's experts, over all layers, that were not
    chosen again; −1 if one of the two choices is not recorded. If several later turns have read a token, the last of
    them counts.

    The entry of a turn that was not read again is ``None``; the result is ``None`` if no turn was read again.
    """
    counts: list[npt.NDArray[np.int64] | None] = [None] * len(episode.turns)
    for leaf in episode.leaves():
        path = episode.path(leaf)
        for length in range(1, len(path) + 1):
            for earlier, counts_T in _read_again(episode, path[:length]):
                counts[earlier] = counts_T
    return counts if any(counts_T is not None for counts_T in counts) else None


def _read_again(episode: EpisodeGraph, path: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield, for each turn that the last turn of ``path`` has read as context with recorded routing, the index of the
    turn and, for each of its tokens, the number of experts that differed. ``path`` has the indices of turns, beginning
    with the root."""
    again = episode.turns[path[-1]].context_routing
    before = 0
    for earlier in path[:-1]:
        tokens = episode.turns[earlier].tokens
        span = slice(before, before + len(tokens))
        before += len(tokens)
        if again is not None and tokens.routing is not None and before <= len(again):
            yield earlier, _count_differing(tokens.routing, again[span])


def _count_differing(first: Routing, again: Routing) -> npt.NDArray[np.int64]:
    """Return for each token the number of its experts in ``first``, over all layers, that are not among its experts of
    the same layer in ``again``; −1 if one of the two is not recorded. The order of the experts does not matter."""
    counts_T = np.full(len(first), -1, np.int64)
    both_T = first.known_T & again.known_T
    places = np.flatnonzero(both_T)
    if len(places) and first.experts_RLK.shape[1:] == again.experts_RLK.shape[1:]:
        before_RLK, after_RLK = (each.take(places).experts_RLK for each in (first, again))
        counts_T[places] = 0
        for rank in range(before_RLK.shape[-1]):  # one rank at a time, which bounds the memory of the comparison
            absent_RL = (before_RLK[..., rank, None] != after_RLK).all(axis=-1)
            counts_T[places] += absent_RL.sum(axis=1)
    return counts_T


def _encode_turn(
    run: OpenRun, index: int, turn: Turn, advantages: Sequence[float] | None, differing: npt.NDArray[np.int64] | None
) -> dict[str, Any]:
    """Return the JSON of turn number ``index`` of ``run`` for the page of an episode, without its tokens.
    ``advantages`` has one number per turn, or is ``None``; ``differing`` is the number of each token's experts that
    were not chosen again, or ``None``."""
    tokens = turn.tokens
    return {
        "index": index,
        "author": turn.author,
        "parent": turn.parent,
        "tokens": len(tokens),
        "sampled": tokens.num_sampled,
        "stop_reason": turn.stop_reason,
        "failed": turn.failed,
        "untrained": turn.untrained,
        "reward": turn.reward,
        "extra": turn.extra,
        "process": turn.process,
        "branch": turn.branch,
        "versions": find_version_range([tokens]),
        "advantage": None if advantages is None else _replace_non_finite(advantages[index]),
        "preview": "".join(run.words.pieces(tokens.ids_T[:PREVIEW_TOKENS].tolist())),
        "kept": _find_range(tokens.kept.sizes_T[tokens.kept.sizes_T > 0]) if tokens.kept is not None else None,
        "experts": None if tokens.routing is None else list(tokens.routing.experts_RLK.shape[1:]),
        "entropy": None if tokens.entropies_T is None else _find_range(tokens.entropies_T[tokens.sampled_T]),
        "rerouted": None if differing is None else int((differing > 0).sum()),
        "logprob": _find_range(tokens.logprobs_T[tokens.sampled_T & np.isfinite(tokens.logprobs_T)]),
        "mixed": int((tokens.versions_T < NOT_SAMPLED).sum()),
    }


def _encode_row(row: EpisodeRow) -> dict[str, Any]:
    """Return the record of an episode for the page, with its key ``GROUP.PLACE`` and its age: the version that trained
    it minus the oldest version that sampled it, ``None`` if it was not trained."""
    age = None if row.step is None or row.oldest is None else row.step - row.oldest
    return {**msgspec.structs.asdict(row), "key": f"{row.group}.{row.place}", "age": age}


def _make_excerpts(run: OpenRun, browser: Browser, row: EpisodeRow) -> dict[str, str]:
    """Return two short texts of an episode for the list: the end of its first prompt, and the beginning of its last
    answer."""
    episode = browser.episode(EpisodeKey(row.group, row.place))
    turns = [] if episode is None else [turn.tokens.ids_T for turn in episode.turns if not turn.tokens.num_sampled]
    answers = [] if episode is None else [turn.tokens.ids_T for turn in episode.turns if turn.tokens.num_sampled]
    prompt = run.words.text(turns[0][-EXCERPT_TOKENS:].tolist()) if turns else ""
    answer = run.words.text(answers[-1][:EXCERPT_TOKENS].tolist()) if answers else ""
    return {"prompt": prompt[-EXCERPT:], "answer": answer[:EXCERPT]}


def _find_match(run: OpenRun, episode: EpisodeGraph, needle: str) -> dict[str, Any] | None:
    """Return the first turn of an ``episode`` of ``run`` that contains ``needle``, a text in folded case, with the text
    around the match; ``None`` if no turn contains it."""
    for index, turn in enumerate(episode.turns):
        text = run.words.text(turn.tokens.ids_T.tolist())
        at = text.casefold().find(needle)
        if at >= 0:
            return {
                "key": str(episode.key),
                "turn": index,
                "author": turn.author,
                "reward": episode.reward,
                "status": episode.status,
                "around": text[max(0, at - 60) : at + len(needle) + 60],
            }
    return None


def _find_turn(run: OpenRun, name: str, turn: int) -> tuple[EpisodeGraph, Turn]:
    """Return the episode with the key ``name`` (``GROUP.PLACE``), and its turn number ``turn``. Raises
    :class:`~headrace.base.errors.DataError` if there is no such turn."""
    key = _parse_key(name)
    episode = run.browser().episode(key)
    if episode is None or not 0 <= turn < len(episode.turns):
        raise DataError(f"episode {key} has no turn {turn}", remedy="choose one from the list")
    episode = with_columns(episode, run.directory)
    return episode, episode.turns[turn]


def parse_whole_number(text: str) -> int | None:
    """Parse ``text`` as a non-negative integer in ASCII digits; return ``None`` if it is not one, or is too long for
    the ledger's 64-bit columns."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
    return int(text) if is_number else None


def _parse_query(parameters: dict[str, str]) -> EpisodeQuery:
    """Convert the parameters of a request to a filter of episodes. Raises :class:`~headrace.base.errors.DataError` for
    an unknown parameter or an invalid value."""
    given = {name: value for name, value in parameters.items() if value not in ("", "offset")}
    try:
        return msgspec.convert(given, EpisodeQuery, strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(EpisodeQuery.__struct_fields__)
        raise DataError(f"the filter cannot be used: {error}", remedy=f"known: {names}") from None


def _parse_number(parameters: dict[str, str], name: str, default: int) -> int:
    """Remove the parameter ``name`` and return its whole number, or ``default`` if it is absent."""
    text = parameters.pop(name, str(default))
    number = parse_whole_number(text)
    if number is None:
        raise DataError(
            f"{name}={text[:40]!r} is not a number", remedy=f"give a whole number from 0 to {'9' * MOST_DIGITS}"
        )
    return number


def _parse_key(name: str) -> EpisodeKey:
    """Parse the key of an episode, such as ``12.3``: group 12, place 3. Raises :class:`~headrace.base.errors.DataError`
    for other text."""
    group, dot, place = name.partition(".")
    numbers = parse_whole_number(group), parse_whole_number(place)
    if not dot or numbers[0] is None or numbers[1] is None:
        raise DataError(f"{name[:60]!r} is no key of an episode", remedy="write GROUP.PLACE, 12.3 for one")
    return EpisodeKey(numbers[0], numbers[1])


def _find_range(values: npt.NDArray[Any]) -> tuple[float, float] | None:
    """Return the smallest and the largest of ``values``; ``None`` if there are none."""
    return (float(values.min()), float(values.max())) if len(values) else None


def _replace_non_finite(value: float) -> float | None:
    """Return ``value``, or ``None`` in place of NaN and infinity, which JSON does not have."""
    return value if np.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherColumns:
    """The values that the learner and teachers computed for the tokens of one episode, by the index of the turn. Turns
    without recorded values have no entry."""

    gaps: Mapping[int, FloatColumn]
    """log π − log μ of each token with loss; NaN for other tokens."""
    teacher_scores: Mapping[int, TeacherScores]
    """The log-probabilities of the tokens under a teacher, which runs in an engine or in the learner's process."""

    @classmethod
    def read(cls, run: OpenRun, episode: EpisodeGraph) -> TeacherColumns:
        """Read the recorded values of ``episode`` from the ledger of the run."""
        learned = run.browser().token_results(episode.key.group)
        served = {
            index: turn.tokens.teacher_scores
            for index, turn in enumerate(episode.turns)
            if turn.tokens.teacher_scores is not None
        }
        if learned is None:
            return cls(gaps={}, teacher_scores=served)
        return cls(gaps=learned.gaps(episode), teacher_scores={**learned.teacher_scores(episode), **served})

    def teacher_gaps(self, episode: EpisodeGraph, turn: int) -> FloatColumn | None:
        """Return log ν − log μ of each token of turn number ``turn`` of ``episode``, with NaN for tokens that the
        teacher did not score; ``None`` if no teacher's scores of the turn were recorded."""
        teacher_scores = self.teacher_scores.get(turn)
        return None if teacher_scores is None else teacher_scores.logprobs_T - episode.turns[turn].tokens.logprobs_T


def explain_missing_teacher(run: OpenRun, step: int | None) -> str:
    """Return the reason why no teacher's values are recorded for an episode that ``step`` of ``run`` trained (``None``:
    the episode was not trained)."""
    teachers: list[dict[str, Any]] = run.setting("learner", "teachers") or []
    if not teachers:
        return "the run has no teacher"
    if any(teacher.get("engine") is not None for teacher in teachers):
        return "no teacher was asked about it"
    if step is None:
        return "no step has taken its group"
    return "not recorded: a teacher beside the learner says log ν only where algo.advantage = 'reverse_kl' asks for it"


def max_abs(gaps_T: FloatColumn | None) -> float | None:
    """Return the largest finite absolute value of ``gaps_T``; ``None`` if it is ``None`` or has no finite value."""
    return None if gaps_T is None or not np.isfinite(gaps_T).any() else float(np.nanmax(np.abs(gaps_T)))
