"""A transport through shared memory, for processes of one machine. A whole version is used without a copy.

    path     slot 0 │ slot 1 │ a payload that is a difference, until the next difference overwrites it

A slot contains the image of one version: the bytes of all its tensors. The engine's parameters are views into the
committed slot. The file never shrinks, so that all pages that a reader has mapped stay valid. The memory of its last
part is allocated when the first difference is written.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.weights import BUCKET_BYTES, NUM_SLOTS, WeightUpdate
from headrace.sync.base import SendRequest, Sent
from headrace.sync.config import Transport, TransportCost


class ShmOutbox:
    """The learner's side of the transport through shared memory, which creates and removes the shared file."""

    def __init__(self, path: Path) -> None:
        """Set the path of the shared file, which :meth:`memory` creates. It must be in a file system in memory, such as
        ``/dev/shm``."""
        self._path = path
        self._has_created = False
        """Whether this process has created the file, and must remove it."""

    def memory(self, num_bytes: int) -> memoryview:
        """Create the shared file, and return its first ``num_bytes`` bytes, which are the slots. Raises
        :class:`~headrace.base.errors.WeightsError` if there is too little memory, or another learner uses the file."""
        what = f"{NUM_SLOTS} copies of the weights need {num_bytes} bytes of shared memory"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _memory_error(self._path, what, error) from None
        try:
            if os.fstat(descriptor).st_size:
                raise WeightsError(
                    f"shared buffer {self._path} holds the weights of another learner",
                    remedy="end that learner, or remove the file",
                )
            self._has_created = True
            # a full /dev/shm is an error here; without the reservation, it would be a signal at a later write
            os.posix_fallocate(descriptor, 0, max(num_bytes, 1))
            os.truncate(descriptor, _file_bytes(num_bytes // NUM_SLOTS))
            return memoryview(mmap.mmap(descriptor, max(num_bytes, 1)))[:num_bytes]
        except (OSError, OverflowError) as error:
            self.close()
            raise _memory_error(self._path, what, error) from None
        finally:
            os.close(descriptor)

    def send(self, request: SendRequest) -> Sent:
        """Return the path of the shared file, which contains the payload of ``request``: a whole version is in its slot
        already, and a difference is written after the slots."""
        if not request.whole:
            try:
                self._write(request)
            except OSError as error:
                what = f"the update to version {request.version} needs {len(request.payload)} bytes of shared memory"
                raise _memory_error(self._path, what, error) from None
        return Sent(path=str(self._path))

    def close(self) -> None:
        """Remove the shared file, if this learner has created it. Engines that have mapped it keep its memory."""
        if self._has_created:
            self._path.unlink(missing_ok=True)

    def _write(self, request: SendRequest) -> None:
        """Write a difference into the shared file, after the slots."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            start_of_payload = _payload_start(request.manifest.total_bytes)
            for start in range(0, len(request.payload), BUCKET_BYTES):
                bucket = request.payload[start : start + BUCKET_BYTES]
                if os.pwrite(descriptor, bucket, start_of_payload + start) != len(bucket):
                    raise OSError("no room for all of it")
        finally:
            os.close(descriptor)


class ShmInbox:
    """The engine's side of the transport through shared memory, which maps the file that an update names."""

    address = ""
    lasting = True

    def __init__(self) -> None:
        """Create the receiver without a mapped file."""
        self._file: memoryview | None = None
        """The mapped file; ``None`` before the first update."""
        self._slots: list[memoryview] = []
        """The slots of the mapped file."""
        self._mapped_file: tuple[str, int, int] | None = None
        """The path, device and inode of the mapped file; ``None`` before the first update."""

    def view(self, update: WeightUpdate) -> memoryview:
        """Return the payload of ``update`` in shared memory, without a copy. Raises
        :class:`~headrace.base.errors.WeightsError` if the file cannot be opened or has an unexpected size."""
        image_bytes = update.manifest.total_bytes
        file = self._mapped(update.path, image_bytes)
        if update.base is None:
            return self._slots[update.slot]
        start = _payload_start(image_bytes)
        return file[start : start + update.num_bytes]

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Raise ``AssertionError``: :meth:`view` always returns the payload, so that nothing has to be fetched."""
        raise AssertionError("shared memory is read where it lies")

    def skip(self, update: WeightUpdate) -> None:
        """Do nothing: there are no received bytes to release."""

    def close(self) -> None:
        """Release the mapped file; its memory is unmapped when no view into it exists any more."""
        self._file, self._slots = None, []

    def _mapped(self, path: str, image_bytes: int) -> memoryview:
        """Return the shared file ``path``, mapped into memory; it is mapped again only if it differs from the file
        mapped before. ``image_bytes`` is the size of one image. Raises :class:`~headrace.base.errors.WeightsError` if
        the file cannot be opened, or its size does not match ``image_bytes``."""
        num_bytes = _file_bytes(image_bytes)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise WeightsError(
                f"shared buffer {path} cannot be opened: {error}",
                remedy="engine and learner of the shm transport must run on one machine, as one user",
            ) from None
        try:
            found = os.fstat(descriptor)
            if found.st_size != num_bytes:
                raise NeedsFull(
                    f"shared buffer {path} has {found.st_size} bytes, the manifest needs {num_bytes}",
                    remedy="publish the version again",
                )
            identity = (path, found.st_dev, found.st_ino)
            if self._file is None or self._mapped_file != identity:
                self._file, self._mapped_file = memoryview(mmap.mmap(descriptor, num_bytes)), identity
                starts = range(0, image_bytes * NUM_SLOTS, image_bytes) if image_bytes else [0] * NUM_SLOTS
                self._slots = [self._file[start : start + image_bytes] for start in starts]
            return self._file
        finally:
            os.close(descriptor)


def _payload_start(image_bytes: int) -> int:
    """Return the offset in the shared file, in bytes, of a payload that is a difference: after the slots."""
    return image_bytes * NUM_SLOTS


def _file_bytes(image_bytes: int) -> int:
    """Return the size of the shared file in bytes: the slots, and space for a difference, which is shorter than an
    image."""
    return max(_payload_start(image_bytes) + image_bytes, 1)


def _memory_error(path: Path, purpose: str, error: Exception) -> WeightsError:
    """Return the error for shared memory that is too small. ``purpose`` is the beginning of the message: the purpose
    and the number of bytes."""
    return WeightsError(
        f"{purpose} at {path.parent}: {error}",
        remedy=f"free that much there (df -h {path.parent}), or enlarge it: mount -o remount,size=... /dev/shm",
    )


SHM = Transport(
    open_outbox=lambda route, token: ShmOutbox(Path(route.address)),
    # each update contains the path of its file
    open_inbox=lambda route, token, limit_bytes: ShmInbox(),
    address=lambda sync, places: str(places.memory),
    copies=lambda sync: NUM_SLOTS,
    one_machine="is memory of one machine",
    cost=TransportCost(gb_s=10.0, fixed_s=0.005, proposed=True),
)
