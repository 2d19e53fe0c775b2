"""What a server has to be able to say, in whatever words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.base.errors import ComponentDied
from headrace.base.types.sampling import Sampling
from headrace.base.types.taught import TopScores
from headrace.wings.servers.client.answer import StreamPart

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseMode:
    """How a server is to stand still."""

    abort: bool = False
    """End every answer with what it has; else they stay, and go on afterwards."""
    recompute: bool = False
    """Forget what was computed of those that stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    version: str
    """Of its program."""
    model: str
    """What it calls its model."""
    max_context: int
    """Tokens of prompt and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One stream that is wanted."""

    ids: Sequence[int]
    """What it begins with: the prompt, and what of the answer is there already."""
    sampling: Sampling
    left: int
    """Tokens that may still come."""
    label: str
    """Of the weights in use: what others have computed is not to be shared."""
    masks: bool = False
    """The server has to tell what each token was drawn from."""
    adapter: str = ""
    """Whose answer it is; empty: the model's own."""


class ServerDialect(Protocol):
    """The API of one kind of server."""

    name: str
    """For people."""
    kind: str
    """``engine.kind``."""
    package: str
    """The distribution that holds it."""
    tested: tuple[str, ...]
    """Versions of its program that were run against the contract."""
    stream_path: str
    """Where answers are asked for."""

    def refusal(self, sampling: Sampling, *, goes_on: bool) -> str:
        """Why it cannot sample so, in words; empty if it can. ``goes_on``: an answer that has begun."""
        ...

    def body(self, ask: Ask) -> dict[str, Any]:
        """Of the request for a stream."""
        ...

    def part(self, event: str, seen: int) -> StreamPart | None:
        """What an event, in JSON, adds to a stream that has brought ``seen`` tokens; ``None`` if nothing. `ValueError`
        for what is none: servers are not believed."""
        ...

    async def meet(self, client: httpx.AsyncClient) -> ServerInfo:
        """Ask who is there."""
        ...

    async def hold(self, client: httpx.AsyncClient, how: PauseMode) -> None:
        """Stand still after the present step."""
        ...

    async def load(self, client: httpx.AsyncClient, path: Path, label: str, adapters: Sequence[str]) -> None:
        """Use what lies in the directory ``path`` of the server's machine from now on (see :mod:`.forms`), and call it
        ``label``. ``adapters``: their folders; none where it is the model itself."""
        ...

    async def name_weights(self, client: httpx.AsyncClient, label: str) -> None:
        """Call the weights that it has ``label``."""
        ...

    async def go_on(self, client: httpx.AsyncClient) -> None:
        """Go on after a hold."""
        ...

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Give the memory back that weights and cache take, while it stands still without an answer to give."""
        ...

    async def wake(self, client: httpx.AsyncClient) -> None:
        """Take it again, with the same weights, and stand still no longer."""
        ...

    async def scores(self, client: httpx.AsyncClient, ids: Sequence[int], top_k: int, adapter: str) -> TopScores:
        """The logprobs of given tokens at temperature 1, and the likeliest entries."""
        ...


async def post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Ask for what has to succeed; the answer's JSON. :class:`~headrace.base.errors.ComponentDied` where it does not:
    what
    the server has then is not known."""
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
    said = answer.headers.get("content-type", "")
    return answer.json() if said.startswith("application/json") else None
