"""What a machine has to know to join a run: a file that only its user can read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.base.errors import ConfigError, DataError

INVITATION_FILE = "join.json"
"""In the run's directory, while the run takes others in."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """To one run, as long as it lives."""

    address: str
    """``HOST:PORT``, or that of a Redis server."""
    key: str
    """Of the door: without it nobody is even answered."""
    token: str
    """Proves that the bearer was invited."""
    relay: str = ""
    """Under which name the run is reached over that server."""
    password_env: str = ""
    """The environment variable that holds the server's password; empty: it wants none."""


def write_invitation(path: Path, invitation: Invitation) -> None:
    """For the owner of the run to hand on."""
    path.unlink(missing_ok=True)  # one of a run that was killed; with what rights it lies there nobody knows
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(invitation) + b"\n")


def read_invitation(path: Path) -> Invitation:
    """Raises :class:`~headrace.base.errors.DataError` where there is none, or nothing that is one."""
    if path.is_dir():
        path = path / INVITATION_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Invitation)
        if not found.relay:
            host_and_port(found.address)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            remedy=f"copy {INVITATION_FILE} from the directory of the run; it is there while a run with launch.join "
            "goes on",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise DataError(
            f"{path} is no invitation: {error}", remedy=f"name the {INVITATION_FILE} of a run's directory"
        ) from None
    return found


def host_and_port(address: str) -> tuple[str, int]:
    """
    >>> host_and_port("10.0.0.5:7781"), host_and_port("[fd00::5]:7781")
    (('10.0.0.5', 7781), ('fd00::5', 7781))
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{address!r} is no address with a port", remedy="write HOST:PORT, as in 10.0.0.5:7781")
    return host, int(port)
