"""The network of a session, which is its loopback interface. Standard library only.

    first process ── listens on 127.0.0.1:PORT in the session's network ── listening socket ══▶ client, which accepts

A socket belongs to the network namespace in which it was made, even in another process. So the client can accept
connections of a session from outside its network. The session reaches nothing else outside.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
BACKLOG = 64
"""The number of connections that may wait until they are accepted."""


def bring_up() -> None:
    """Bring up the loopback interface of this process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        request = bytearray(struct.pack("16sH14x", b"lo", 0))
        fcntl.ioctl(probe_socket, _GET_FLAGS, request)
        (flags,) = struct.unpack_from("H", request, 16)
        struct.pack_into("H", request, 16, flags | _UP)
        fcntl.ioctl(probe_socket, _SET_FLAGS, bytes(request))


def send_listeners(ports: list[int], descriptor: int) -> None:
    """Listen on these ports of 127.0.0.1, and send the listening sockets through the socket ``descriptor``, which is
    then closed."""
    with socket.socket(fileno=descriptor) as channel:
        for port in ports:
            with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as listener:
                channel.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))])
