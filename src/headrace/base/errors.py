"""Every error Headrace raises on purpose, drawn once.

    HeadraceError                    what is wrong, and what to do about it
    ├── ConfigError (ValueError)     a run file, option or argument that cannot work
    ├── DataError (ValueError)       a row, a file of rows, a prompt
    ├── ModelError (ValueError)      a model directory or an architecture
    ├── RequestError (ValueError)    one request that an engine cannot serve
    │   ├── EngineFull (ValueError)     it has as many as it takes: later it might
    │   └── SequenceFailed (ValueError) it was sound, and broke while it was computed
    ├── EpisodeError                 one episode that cannot go on, by a reason that is counted
    │   └── BudgetSpent                 it has used up turns, tokens, tool calls or context
    ├── EnvError                     a reward or environment that cannot be used at all
    ├── WeightsError                 a weight update refused before anything changed
    │   └── NeedsFull                   its bytes are wrong, or the version it builds on is not here: send it whole
    ├── LedgerError                  a ledger that cannot be opened, read or believed
    ├── CheckpointError              a snapshot that cannot be written or read
    └── RunError                     a run that had to end
        ├── ComponentDied            a process ended that should not have
        │   ├── EngineUnfit          an engine that starting again would not mend
        │   ├── LearnerLost          the learner's, or that of a rank: the run can go on from its last snapshot
        │   └── RankLost             a rank of the learner that cannot go on without another one
        ├── StallError               nothing moved for the stall timeout
        ├── DeadlineError            one wait took longer than it may
        ├── ReplayDiffers            a replay that came to something else than the run it repeats
        └── NothingToLearn           the rewards carry no signal

Each failure belongs to one boundary: an episode's failure is a record, not an exception (see
:class:`headrace.base.types.episode.EpisodeGraph`); what is raised here reaches the user.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable


class HeadraceError(Exception):
    """The root: ``problem`` names the thing, its value and the reason; ``remedy`` says what to do.

    >>> str(HeadraceError("flow.lead=-1 is negative", remedy="set flow.lead >= 0"))
    'flow.lead=-1 is negative\\n  remedy: set flow.lead >= 0'
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"


class ConfigError(HeadraceError, ValueError):
    """A run file, option or argument that cannot work."""


class DataError(HeadraceError, ValueError):
    """A row, a file of rows or a prompt that cannot be used."""


class ModelError(HeadraceError, ValueError):
    """A model directory or an architecture that cannot be used."""


class RequestError(HeadraceError, ValueError):
    """One generation request that an engine cannot serve; other requests go on."""


class EngineFull(RequestError):
    """As many requests as the engine takes are waiting or running; others may succeed later."""


class SequenceFailed(RequestError):
    """A sequence broke while it was computed; the request itself was sound."""


class EpisodeError(HeadraceError):
    """One episode that cannot go on; the others do. ``reason`` is what it is counted by."""

    def __init__(self, problem: str, *, remedy: str, reason: str = "env_error") -> None:
        super().__init__(problem, remedy=remedy)
        self.reason = reason


class BudgetSpent(EpisodeError):
    """An episode has used up what it may have of turns, tokens, tool calls or context."""


class EnvError(HeadraceError):
    """A reward function or an environment that cannot be used at all."""


class WeightsError(HeadraceError):
    """A weight update that was refused before anything changed."""


class NeedsFull(WeightsError):
    """A weight update whose bytes are wrong, or that builds on a version that is not here: it can be sent whole."""


class LedgerError(HeadraceError):
    """A ledger that cannot be opened, read or believed."""


class CheckpointError(HeadraceError):
    """A snapshot that cannot be written or read."""


class RunError(HeadraceError):
    """A run that had to end before its last step."""


class ComponentDied(RunError):
    """A process of the run ended that should not have."""


class EngineUnfit(ComponentDied):
    """An engine cannot serve this run, and would not if it were started again."""


class LearnerLost(ComponentDied):
    """The process of the learner, or of one of its ranks, ended without a word: the run can go on from its last
    snapshot."""


class RankLost(ComponentDied):
    """A rank of the learner cannot go on because another one went away: a consequence, and not the cause."""


class StallError(RunError):
    """Nothing moved for the stall timeout; the text names who waits for whom."""


class DeadlineError(RunError):
    """One wait took longer than its deadline."""


class ReplayDiffers(RunError):
    """A replay came to something else than the run it repeats; the text names what, and where."""


class NothingToLearn(RunError):
    """The rewards of many steps in a row carry no signal."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The phrase that offers the nearest known name, whatever its case, for the end of an error.

    >>> nearest("dappo", ["grpo", "dapo"])
    "did you mean 'dapo'? (known: dapo, grpo)"
    """
    names = sorted(known)
    folded = {known_name.casefold(): known_name for known_name in names}
    close = [folded[match] for match in difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)]
    listed = f"known: {', '.join(names)}"
    return f"did you mean {close[0]!r}? ({listed})" if close else listed


def visible(text: str, limit: int = 10_000) -> str:
    """``text`` on one line, with every control, direction and format character spelled out, cut at ``limit``.

    >>> visible("a\\x1b[31mb\\nc")
    'a\\\\x1b[31mb\\\\nc'
    """
    cut = text[:limit]
    shown = "".join(_spell(character) for character in cut)
    return shown + "…" if len(text) > limit else shown


def _spell(character: str) -> str:
    if character == " " or unicodedata.category(character)[0] not in "CZ":
        return character
    return character.encode("unicode_escape").decode("ascii")
