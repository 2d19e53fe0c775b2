"""The contract of a server's API (:class:`ServerDialect`): the operations that a kind of server must support to be used
as an engine. A label is the server's name for a version of the weights. The parameter ``client`` is always the HTTP
client of the server."""

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
    """The way in which a server pauses for a commit."""

    abort: bool = False
    """Whether to end the stream of every answer with the tokens sampled so far; otherwise answers stay in the server
    and continue after the pause."""
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
    """A request for one stream, which samples an answer or the rest of an answer."""

    ids: Sequence[int]
    """The prompt of the stream: the tokens of the request's prompt, and of the part of the answer that exists
    already."""
    sampling: Sampling
    """The sampling settings of the answer."""
    max_new_tokens: int
    """Largest number of new tokens."""
    label: str
    """Label of the weights in use. The prefix cache must not be shared between labels."""
    record_kept: bool = False
    """Whether the server must report the kept-set of each token."""
    adapter: str = ""
    """Name of the adapter to sample with; empty for the model itself."""


class ServerDialect(Protocol):
    """The contract of the API of one kind of server, such as vLLM: the requests that an engine sends to it, and the
    decoding of its responses."""

    name: str
    """The server's name for display."""
    package: str
    """Name of the Python distribution that contains the server."""
    tested: tuple[str, ...]
    """Versions of the server that have passed the contract suite."""
    stream_path: str
    """URL path of requests for streams."""

    def refusal(self, sampling: Sampling, *, continues: bool) -> str:
        """Return the reason why the server cannot sample with the settings ``sampling``; empty if it can. With
        ``continues``, another engine has begun the answer."""
        ...

    def body(self, request: StreamRequest) -> dict[str, Any]:
        """Return the JSON body of the HTTP request for a stream, in the server's format."""
        ...

    def part(self, event: str, num_seen: int) -> StreamPart | None:
        """Decode the JSON text of one event of a stream, of which ``num_seen`` tokens have been received; return
        ``None`` if the event adds nothing. Raises ``ValueError`` for an invalid event, since the server is not
        trusted."""
        ...

    async def identify(self, client: httpx.AsyncClient) -> ServerInfo:
        """Request and return the server's version, model and context."""
        ...

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Make the server stop generating after the current step, in the way that ``mode`` describes."""
        ...

    async def load(self, client: httpx.AsyncClient, path: Path, label: str, adapters: Sequence[str]) -> None:
        """Make the server load the weights in ``path``, a directory on the server's machine (see :mod:`.forms`), and
        set their label to ``label``. ``adapters`` are the names of the adapters' folders; empty if the model itself is
        trained."""
        ...

    async def name_weights(self, client: httpx.AsyncClient, label: str) -> None:
        """Set the label of the server's current weights to ``label``, without changing the weights."""
        ...

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Make the server continue generating after a pause."""
        ...

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Make the server release the memory of weights and cache. The server must be paused and have no answer in
        progress."""
        ...

    async def wake(self, client: httpx.AsyncClient) -> None:
        """Make the server allocate the memory again, with the same weights, and end its pause."""
        ...

    async def scores(self, client: httpx.AsyncClient, ids: Sequence[int], top_k: int, adapter: str) -> TopScores:
        """Return the logprob of each of the tokens ``ids``, conditioned on the tokens before it, at temperature 1, and
        the ``top_k`` likeliest tokens at each position. ``adapter`` is the name of the adapter to compute with; empty
        for the model itself."""
        ...


async def post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a POST request, and return the JSON of the response, or ``None`` if the response is not JSON. Raises
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
