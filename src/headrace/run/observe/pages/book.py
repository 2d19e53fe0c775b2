"""The writer of the directory of an evaluation, which makes several *attempts* (episodes) at each task. It writes a
line and a page for each episode that ends, and an index at the end of the evaluation.

DIRECTORY/index.html               the figures, and every attempt
          episodes/3-1.html        the second attempt at the fourth task
          episodes.jsonl           a line for each attempt, in the order in which they ended
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import off_loop
from headrace.base.errors import ConfigError, RunError
from headrace.base.types.episode import EpisodeGraph
from headrace.control.evaluation import IntervalEstimate
from headrace.run.observe.pages.episode import Decode, make_episode_page
from headrace.run.observe.pages.index import AttemptSummary, make_index_page

PAGES, LINES, INDEX = "episodes", "episodes.jsonl", "index.html"
"""The names in the directory: the folder of the pages, the file of lines, and the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInputs:
    """The facts about an evaluation that its pages show or need, in addition to the episodes."""

    rows: Sequence[Mapping[str, Any]]
    """The row of each task, by the task's number."""
    num_attempts: int
    """The number of attempts at each task."""
    decode: Decode
    """The function from token ids to text, special tokens included."""
    max_pages: int
    """The maximum number of episodes that get a page: the first attempts at all tasks come first, then the second
    attempts, and so on."""


class PageWriter:
    """The writer of the directory of one evaluation: it writes each episode when the episode has ended, and the index
    at the end. All methods are called from one event loop; :meth:`keep` writes in a thread.

    Every method raises :class:`~headrace.base.errors.RunError` if the directory cannot be written. The constructor
    raises :class:`~headrace.base.errors.ConfigError` for a directory that holds an evaluation already.
    """

    def __init__(self, directory: Path, inputs: PageInputs) -> None:
        """Create ``directory``, if it is missing, with an empty file of lines. ``inputs`` contains the tasks and the
        number of episodes that get a page."""
        self._directory = directory
        self._inputs = inputs
        self._attempts: dict[tuple[int, int], AttemptSummary] = {}
        """The entries of the attempts that have ended, by the numbers of the task and of the attempt."""
        if (directory / LINES).exists():
            raise ConfigError(f"{directory} holds an evaluation already", remedy="choose another directory")
        self._write_or_raise(lambda: (directory / PAGES).mkdir(parents=True, exist_ok=True))
        self._write_or_raise(lambda: (directory / LINES).write_bytes(b""))

    async def keep(self, episode: EpisodeGraph) -> None:
        """Write the line of ``episode``, which has ended, and, if the episode is among the first ``max_pages``, its
        page; also store its reward for the index. The files are written in a thread, so that other episodes
        continue."""
        task, attempt = episode.key
        order = attempt * len(self._inputs.rows) + task
        page = f"{PAGES}/{task}-{attempt}.html" if order < self._inputs.max_pages else ""
        self._attempts[task, attempt] = AttemptSummary(reward=episode.reward, cause=episode.cause, page=page)
        await off_loop(partial(self._write_or_raise, partial(self._write_episode, episode, page)))

    def finish(self, title: str, figures: Mapping[str, IntervalEstimate], notes: Sequence[str]) -> Path:
        """Write the index page at the end of the evaluation, and return its path. ``title`` is its heading, ``figures``
        are the results, and ``notes`` are the warnings of the evaluation, shown above the results."""
        tasks = [
            [
                self._attempts[task, attempt]
                for attempt in range(self._inputs.num_attempts)
                if (task, attempt) in self._attempts
            ]
            for task in range(len(self._inputs.rows))
        ]
        index = self._directory / INDEX
        self._write_or_raise(lambda: index.write_text(make_index_page(title, figures, notes, tasks), encoding="utf-8"))
        return index

    def _write_episode(self, episode: EpisodeGraph, page: str) -> None:
        """Append the line of ``episode`` to ``episodes.jsonl``, and write its page to the path ``page`` in the
        directory. If ``page`` is empty, no page is written."""
        line = {
            "task": episode.key.group,
            "attempt": episode.key.place,
            "status": str(episode.status),
            "reward": episode.reward,
            "cause": episode.cause,
            "parts": episode.parts,
            "extra": {name: value for turn in episode.turns for name, value in turn.extra.items()},
            "answers": sum(turn.stop_reason is not None for turn in episode.turns),
            "tokens": episode.num_sampled,
            "page": page,
        }
        with (self._directory / LINES).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        if page:
            row = dict(self._inputs.rows[episode.key.group])
            (self._directory / page).write_text(make_episode_page(episode, row, self._inputs.decode), encoding="utf-8")

    def _write_or_raise(self, write: Callable[[], object]) -> None:
        """Call ``write``, which writes to the disk. Raises :class:`~headrace.base.errors.RunError` if ``write`` raises
        an ``OSError``."""
        try:
            write()
        except OSError as error:
            raise RunError(
                f"{self._directory} cannot be written: {error}", remedy="check that its disk has room (df -h)"
            ) from None
