"""The contract of a server's API: what a kind of server must offer to be an engine. A label is the name under which the
server knows a version of the weights; ``client`` is always the HTTP client of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.base.errors import ComponentDied
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.wings.servers.client.answer import StreamPart

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseMode:
    """The way in which a server is to pause for a commit."""

    abort: bool = False
    """Whether to end every answer with the tokens it has; otherwise answers stay and continue after the pause."""
    recompute: bool = False
    """Whether to discard the key-value cache of the answers that stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The facts that a server reports about itself."""

    version: str
    """Version of the server's program."""
    model: str
    """The server's name for its model."""
    max_context: int
    """Largest number of tokens of a prompt and its answer together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """A request for one stream: an answer, or the rest of one."""

    ids: Sequence[int]
    """The tokens that the stream starts with: the prompt, and the part of the answer that exists already."""
    sampling: Sampling
    """The sampling settings of the answer."""
    max_new_tokens: int
    """Number of tokens that may be added."""
    label: str
    """Label of the weights in use. The prefix cache must not be shared between labels."""
    record_kept: bool = False
    """Whether the server must report the kept-set of each token."""
    adapter: str = ""
    """Name of the adapter that answers; empty for the model itself."""


class ServerDialect(Protocol):
    """The API of one kind of server, such as vLLM: the requests and replies that an engine exchanges with it."""

    name: str
    """The server's name for display."""
    kind: str
    """The ``engine.kind`` that chooses it."""
    package: str
    """Name of the Python distribution that contains the server."""
    tested: tuple[str, ...]
    """Versions of the server that have passed the contract suite."""
    stream_path: str
    """URL path of requests for streams."""

    def refusal(self, sampling: Sampling, *, continues: bool) -> str:
        """Return why the server cannot sample with ``sampling``; empty if it can. ``continues`` says that another
        engine has begun the answer."""
        ...

    def body(self, request: StreamRequest) -> dict[str, Any]:
        """Return the JSON body of the HTTP request for a stream, in the server's format."""
        ...

    def part(self, event: str, num_seen: int) -> StreamPart | None:
        """Return what the JSON text of an event adds to a stream that has had ``num_seen`` tokens; ``None`` if nothing.
        Raises ``ValueError`` for an invalid event, since the server is not trusted."""
        ...

    async def identify(self, client: httpx.AsyncClient) -> ServerInfo:
        """Return the server's version, model and context, as it reports them."""
        ...

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Stop generating after the current step, in the way of ``mode``."""
        ...

    async def load(self, client: httpx.AsyncClient, path: Path, label: str, adapters: Sequence[str]) -> None:
        """Load the files in ``path``, a directory on the server's machine (see :mod:`.forms`), and name these weights
        ``label``. ``adapters`` are the adapters' folders, empty if the model itself is trained."""
        ...

    async def name_weights(self, client: httpx.AsyncClient, label: str) -> None:
        """Give the server's current weights the name ``label``, without changing them."""
        ...

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Continue generating after a pause."""
        ...

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Release the memory of weights and cache, while the server is paused and has no answer in progress."""
        ...

    async def wake(self, client: httpx.AsyncClient) -> None:
        """Allocate the memory again, with the same weights, and end the pause."""
        ...

    async def scores(self, client: httpx.AsyncClient, ids: Sequence[int], top_k: int, adapter: str) -> TopScores:
        """Return the logprob of each of ``ids`` after those before it at temperature 1, and the ``top_k`` likeliest
        tokens in each place. ``adapter`` is the adapter that computes; empty for the model itself."""
        ...


async def post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a request that must succeed, and return the JSON of its answer. Raises
    :class:`~headrace.base.errors.ComponentDied` if it fails, because the state of the server is then unknown."""
    import httpx

    try:
        answer = await client.post(path, json=body)
    except httpx.HTTPError as error:
        raise ComponentDied(
            f"the server at {client.base_url} broke off {path}: {type(error).__name__}: {error}",
            remedy="look at the server's log",
        ) from None
    if answer.status_code != 200:
        raise ComponentDied(
            f"the server at {client.base_url} answered {path} with {answer.status_code}: {answer.text[:1000]}",
            remedy="look at the server's log; is it started as docs/engines.md says?",
        )
    content_type = answer.headers.get("content-type", "")
    return answer.json() if content_type.startswith("application/json") else None
