"""All errors that Headrace raises on purpose, and helpers for their messages.

    HeadraceError                    the base class: a problem and its remedy
    ├── ConfigError (ValueError)     a run file, option or argument that cannot work
    ├── DataError (ValueError)       a row, a file of rows, a prompt
    ├── ModelError (ValueError)      a model directory or an architecture
    ├── RequestError (ValueError)    one request that an engine cannot serve
    │   ├── EngineFull (ValueError)     the engine has its largest number of requests: a later request may succeed
    │   └── SequenceFailed (ValueError) the request was valid, and computing its sequence failed
    ├── EpisodeError                 one episode that cannot continue, with a counted reason
    │   └── BudgetSpent                 the episode has used up its turns, tokens, tool calls or context
    ├── EnvError                     a reward or environment that cannot be used at all
    │   └── NoRewards                   the reward was None for every answer
    ├── WeightsError                 a weight update that was refused before anything changed
    │   └── NeedsFull                   an update with wrong bytes or a missing base version: send the full weights
    ├── StoreError                   columns of tokens that cannot be written to, or read from, their store
    ├── LedgerError                  a ledger that cannot be opened or read, or whose contents are invalid
    ├── CheckpointError              a snapshot that cannot be written or read
    └── RunError                     a run that had to end
        ├── ComponentDied            a process that ended unexpectedly
        │   ├── EngineUnfit          an engine that would fail again after a restart
        │   ├── LearnerLost          the learner or one of its ranks: the run can continue from its last snapshot
        │   └── RankLost             a rank of the learner that cannot continue without another rank
        ├── StallError               no progress for the stall timeout
        ├── DeadlineError            a wait that took longer than its deadline
        ├── ReplayDiffers            a replay whose results differ from the run that it repeats
        └── NothingToLearn           rewards without a training signal

Each failure belongs to one boundary: an episode's failure is a record, not an exception (see
:class:`headrace.base.types.episode.EpisodeGraph`); the errors above reach the user.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable


class HeadraceError(Exception):
    """The base class of every error that Headrace raises on purpose. ``problem`` names the invalid item, its value and
    the reason; ``remedy`` says how the user can correct it.

    >>> str(HeadraceError("flow.lead=-1 is negative", remedy="set flow.lead >= 0"))
    'flow.lead=-1 is negative\\n  remedy: set flow.lead >= 0'
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        """Store ``problem``, which says what is wrong, and ``remedy``, which says how the user can correct it."""
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        """Return the problem and, on a second line, the remedy."""
        return f"{self.problem}\n  remedy: {self.remedy}"


class ConfigError(HeadraceError, ValueError):
    """The error raised for a run file, option or argument that cannot work."""


class DataError(HeadraceError, ValueError):
    """The error raised for data that cannot be used, such as a row, a file of rows, a prompt, the samples of a batch,
    or what a user's loss returns for them."""


class ModelError(HeadraceError, ValueError):
    """The error raised for a model directory or a model architecture that cannot be used."""


class RequestError(HeadraceError, ValueError):
    """The error raised for one generation request that an engine cannot serve; other requests are not affected."""


class EngineFull(RequestError):
    """The error raised for a request to an engine that has its largest number of requests; a later request may
    succeed."""


class SequenceFailed(RequestError):
    """The error raised for a sequence that failed while it was computed, although its request was valid."""


class EpisodeError(HeadraceError):
    """The error raised for one episode that cannot continue; other episodes are not affected. ``reason`` is the short
    name under which the run counts such failures."""

    def __init__(self, problem: str, *, remedy: str, reason: str = "env_error") -> None:
        """Store ``reason``, the short name under which the run counts the failure. The other arguments are those of
        :class:`HeadraceError`."""
        super().__init__(problem, remedy=remedy)
        self.reason = reason


class BudgetSpent(EpisodeError):
    """The error raised for an episode that has used up its budget of turns, tokens, tool calls or context."""


class EnvError(HeadraceError):
    """The error raised for a reward function or an environment that cannot be used at all."""


class NoRewards(EnvError):
    """The error raised for a reward function that returned ``None`` for every answer of many groups."""


class WeightsError(HeadraceError):
    """The error raised for a weight update that could not be sent, or that an engine refused. The weights in use are
    unchanged."""


class NeedsFull(WeightsError):
    """The error raised for a weight update that an engine cannot apply: for example, its bytes are wrong, or it
    contains the difference to a version that the engine does not have. The learner can send the full weights
    instead."""


class StoreError(HeadraceError):
    """The error raised for a column store that is full or cannot be written, or for a part of the store that is missing
    or does not match its checksum."""


class LedgerError(HeadraceError):
    """The error raised for a ledger that cannot be opened or read, or whose contents are invalid."""


class CheckpointError(HeadraceError):
    """The error raised for a snapshot that cannot be written or read."""


class RunError(HeadraceError):
    """The error that ends a run before its last step; each kind of cause is a subclass."""


class ComponentDied(RunError):
    """The error raised for a process of the run that ended unexpectedly."""


class EngineUnfit(ComponentDied):
    """The error raised for an engine that cannot serve this run and would fail again after a restart."""


class LearnerLost(ComponentDied):
    """The error raised for a learner, or for one of its ranks, whose process ended without a message. The run can
    continue from its last snapshot."""


class RankLost(ComponentDied):
    """The error raised for a rank of the learner that cannot continue because another rank has ended. It is a
    consequence and not the cause of a failure."""


class StallError(RunError):
    """The error that ends a run without progress for the stall timeout. The message names which part waits for which
    other part."""


class DeadlineError(RunError):
    """The error raised for a wait that took longer than its deadline."""


class ReplayDiffers(RunError):
    """The error raised for a replay whose results differ from the run that it repeats. The message names the first
    difference."""


class NothingToLearn(RunError):
    """The error that ends a run because the rewards of many consecutive steps carry no training signal, for example
    because all attempts at a task have the same reward."""


NEAR = 0.7
"""The smallest similarity, as :mod:`difflib` measures it, at which a known name is suggested for an unknown name.
"solution" and "completion", which end alike but have different meanings, have a similarity of 0.67."""


class StoppedAtStart(KeyboardInterrupt):
    """The exception that a signal raises in a run that is still starting."""

    def __init__(self, signal_name: str) -> None:
        """Store ``signal_name``, the name of the signal, such as ``SIGTERM``."""
        super().__init__(f"stopped by {signal_name} while it was starting")
        self.signal_name = signal_name


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about the unknown ``name``: the most similar of the ``known`` names, if one is
    similar, and a list of all of them. Upper and lower case are not distinguished.

    >>> nearest("dappo", ["grpo", "dapo"])
    "did you mean 'dapo'? (known: dapo, grpo)"
    >>> nearest("solution", ["answer", "completions"])
    'known: answer, completions'
    """
    names = sorted(known)
    folded = {known_name.casefold(): known_name for known_name in names}
    transposed = [each for each in folded if sorted(each) == sorted(name.casefold())]  # difflib misses lr, rl
    matches = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=NEAR) or transposed[:1]
    close = [folded[match] for match in matches]
    listed = f"known: {', '.join(names)}"
    return f"did you mean {close[0]!r}? ({listed})" if close else listed


def visible(text: str, limit: int = 10_000) -> str:
    """Return ``text`` as one line that is safe to print: every control, direction and format character is escaped, and
    the text is truncated after ``limit`` characters.

    >>> visible("a\\x1b[31mb\\nc")
    'a\\\\x1b[31mb\\\\nc'
    """
    cut = text[:limit]
    shown = "".join(_escape(character) for character in cut)
    return shown + "…" if len(text) > limit else shown


def _escape(character: str) -> str:
    """Return a character unchanged if it is printable or a plain space; otherwise return its escape sequence, such as
    ``\\n``."""
    if character == " " or unicodedata.category(character)[0] not in "CZ":
        return character
    return character.encode("unicode_escape").decode("ascii")
