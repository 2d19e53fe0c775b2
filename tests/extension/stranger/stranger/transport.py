"""A transport: a file for each version, below the run directory."""

from __future__ import annotations

from pathlib import Path

from headrace.base.config import Section
from headrace.base.errors import NeedsFull
from headrace.base.types.weights import WeightUpdate
from headrace.extend import Transport
from headrace.sync.base import SendRequest, Sent
from headrace.sync.config import TransportCost
from headrace.sync.manifest import private_memory


class FolderOptions(Section):
    """``[sync.options]`` of this transport."""

    name: str = "versions"
    """The prefix of the files."""


class FolderOutbox:
    """The learner's side."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        folder.mkdir(parents=True, exist_ok=True)

    def memory(self, num_bytes: int) -> memoryview:
        return private_memory(num_bytes)

    def send(self, request: SendRequest) -> Sent:
        path = f"{self._name}-{request.version}"
        (self._folder / path).write_bytes(request.payload)
        return Sent(path=path)

    def close(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()


class FolderInbox:
    """The engine's side."""

    address = ""
    lasting = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def view(self, update: WeightUpdate) -> None:
        return None

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        found = (self._folder / Path(update.path).name).read_bytes()
        if len(found) != len(into):
            raise NeedsFull(f"version {update.version} has {len(found)} bytes", remedy="send it again")
        into[:] = found

    def skip(self, update: WeightUpdate) -> None:
        """The file stays where it is."""

    def close(self) -> None:
        """Nothing is held."""


FOLDER = Transport(
    open_outbox=lambda route, token: FolderOutbox(Path(route.address), FolderOptions(**route.options).name),
    open_inbox=lambda route, token, limit_bytes: FolderInbox(Path(route.address)),
    address=lambda sync, places: str(places.run_dir / "folder"),
    options=FolderOptions,
    one_machine="is for one machine",
    cost=TransportCost(gb_s=1.0, fixed_s=0.1),
)
