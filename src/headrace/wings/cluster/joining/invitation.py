"""The invitation of a run: a file, readable by its user only, with which another machine joins the run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.base.config.addresses import host_and_port
from headrace.base.errors import ConfigError, DataError
from headrace.launch.config import INVITATION_FILE


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """An invitation to one run, which the user copies to another machine. It is valid until the run ends."""

    address: str
    """``HOST:PORT`` at which the run listens for machines."""
    key: str
    """Public key of the listener, with which the connection is encrypted. Connections without the key receive no
    answer."""
    token: str
    """Secret with which a request to join authenticates itself."""


def write_invitation(path: Path, invitation: Invitation) -> None:
    """Write ``invitation`` to the file ``path``, which only this user can read."""
    path.unlink(missing_ok=True)  # a killed run may have left such a file with other permissions
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(invitation) + b"\n")


def read_invitation(path: Path) -> Invitation:
    """Return the invitation at ``path``, which is the file or the directory of the run. Raises
    :class:`~headrace.base.errors.DataError` if the file does not exist or is not an invitation."""
    if path.is_dir():
        path = path / INVITATION_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Invitation)
        host_and_port(found.address)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            remedy=f"copy {INVITATION_FILE} from the directory of the run; it is there while a run with launch.join "
            "continues",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise DataError(
            f"{path} is not an invitation: {error}", remedy=f"name the {INVITATION_FILE} of a run's directory"
        ) from None
    return found
