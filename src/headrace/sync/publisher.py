"""The learner's side of the weight sync. It copies the weights into a buffer, and hashes, encodes and sends the copy
while training continues. A *slot* is one of two such buffers; the *image* in it is the bytes of all tensors of one
version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.base.errors import ConfigError, WeightsError
from headrace.base.types.weights import NUM_SLOTS, WeightUpdate
from headrace.models.weights import belongs_to_adapter
from headrace.sync.base import Codec, Outbox, SendRequest
from headrace.sync.codecs import delta
from headrace.sync.manifest import checksums, plan, view
from headrace.sync.pieces import TensorBoxes, make_layout, whole_boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnnouncedVersion:
    """The version that was last announced from a slot, with the hash of each tensor or piece."""

    version: int
    checksums: tuple[int, ...]


class Publisher:
    """The publisher of a learner's weights: it copies them into one of two slots, and sends the slot to the engines.
    With some transports, every rank of the learner has a publisher, and sends the parts of the weights that it holds.

    Every :meth:`copy` reads the tensors again. One thread may copy while one other thread announces.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        codec: Codec,
        outbox: Outbox,
        boxes_by_rank: Sequence[TensorBoxes] | None = None,
        rank: int = 0,
    ) -> None:
        """Publish ``tensors``, the weights by name, represented by ``codec`` and sent through ``outbox``.

        ``boxes_by_rank`` are the parts of the tensors that each rank of the learner sends, and ``rank`` is the index of
        this rank; ``None``: this process sends all weights. Raises :class:`~headrace.base.errors.ConfigError` for a
        model that trains more than adapters if the codec sends adapters only, and for parts that the codec cannot
        represent.
        """
        if codec.adapters_only and not all(belongs_to_adapter(name) for name in tensors):
            raise ConfigError(
                "sync.codec='adapter' sends adapters alone, and this model is trained as a whole",
                remedy="set model.lora.rank, or sync.codec = 'full'",
            )
        self._tensors, self._codec, self._outbox = list(tensors.values()), codec, outbox
        parts = {name: codec.form.parts(name, tensor) for name, tensor in tensors.items()}
        self.manifest = plan({name: part for group in parts.values() for name, part in group.items()})
        sent = whole_boxes(tensors) if boxes_by_rank is None else boxes_by_rank[rank]
        self._layout = make_layout(sent, tensors, codec.form)
        """The layout of the pieces that this rank sends."""
        self._layouts = tuple(make_layout(each, tensors, codec.form) for each in boxes_by_rank or ())
        """The layouts of all ranks, if each rank sends its own pieces."""
        pieces = self._layout.pieces
        memory = outbox.memory(pieces.total_bytes * NUM_SLOTS)
        self._images = [memory[slot * pieces.total_bytes :][: pieces.total_bytes] for slot in range(NUM_SLOTS)]
        """The slots in shared memory, one image each."""
        counts = [len(parts[name]) for name in sent]
        self._views = [_grouped([view(image, e) for e in pieces.entries], counts) for image in self._images]
        """For each slot, the views of each tensor's parts in its image."""
        self._announced: list[_AnnouncedVersion | None] = [None] * NUM_SLOTS
        """The version in each slot that was announced; ``None`` for a slot without one."""

    def copy(self, slot: int) -> None:
        """Copy the present values of all tensors into the slot with the index ``slot``. The learner waits for this
        call, and for no other one."""
        self.fill(slot, self._tensors)

    @torch.no_grad()
    def fill(self, slot: int, tensors: Iterable[Tensor]) -> None:
        """Copy ``tensors`` into the slot with the index ``slot``: all of the learner's tensors, or the parts that this
        rank sends, in the order of the publisher's ``tensors`` or ``boxes_by_rank``. ``tensors`` may be an iterator
        that makes one tensor at a time."""
        self._announced[slot] = None
        for parts, tensor in zip(self._views[slot], tensors, strict=True):
            self._codec.form.write(parts, tensor.detach())

    def announce(self, version: int, slot: int, to: Sequence[str] = ()) -> WeightUpdate:
        """Hash the image in ``slot``, send it as ``version`` to the receivers at the addresses ``to``, and return the
        update with which engines stage it. If the codec sends differences, the difference from the version in the other
        slot is sent if it is shorter."""
        hashes = checksums(self._images[slot], self._layout.pieces)
        base = self._announced[1 - slot] if self._codec.differences else None
        self._announced[slot] = _AnnouncedVersion(version=version, checksums=hashes)
        request = self._send_request(version, slot, to)
        if base is None or base.version >= version:
            return self._send(request)
        previous = self._images[1 - slot]
        if self._layouts:
            return self._send(replace(request, previous=previous, base_version=base.version), base.version)
        payload = delta.encode(self._images[slot], previous, self.manifest)
        if payload is None:
            return self._send(request)
        return self._send(replace(request, payload=memoryview(payload), whole=False), base.version)

    def resend(self, version: int, slot: int, to: Sequence[str] = ()) -> WeightUpdate:
        """Send ``version`` from ``slot`` once more, as the full image, to the addresses ``to``. Return the new update.
        Raises :class:`~headrace.base.errors.WeightsError` if the slot does not contain that version any more, bit for
        bit."""
        announced = self._announced[slot]
        if announced is None or announced.version != version:
            raise WeightsError(f"version {version} is not in slot {slot} any more", remedy="publish a newer version")
        hashes = checksums(self._images[slot], self._layout.pieces)
        for entry, old_hash, new_hash in zip(self._layout.pieces.entries, announced.checksums, hashes, strict=True):
            if old_hash != new_hash:
                raise WeightsError(
                    f"version {version}: tensor {entry.name} has changed in the learner's buffer, from the hash "
                    f"{old_hash:016x} to {new_hash:016x}",
                    remedy="publish a newer version; if it happens again, test the machine's memory",
                )
        return self._send(replace(self._send_request(version, slot, to), again=True))

    def close(self) -> None:
        """Release the buffers and close the transport."""
        self._views.clear()
        self._images.clear()
        self._outbox.close()

    def _send_request(self, version: int, slot: int, to: Sequence[str]) -> SendRequest:
        """Return the request to send the whole image in ``slot`` as ``version`` to the addresses ``to``."""
        announced = self._announced[slot]
        assert announced is not None
        return SendRequest(
            version=version,
            slot=slot,
            payload=self._images[slot],
            manifest=self.manifest,
            whole=True,
            to=to,
            checksums=announced.checksums,
            layout=self._layout,
        )

    def _send(self, request: SendRequest, base: int | None = None) -> WeightUpdate:
        """Send the payload of ``request``, and return the update with its location for the engines. ``base`` is the
        version from which the payload is a difference; ``None`` for a whole image."""
        sent = self._outbox.send(request)
        # each rank chooses the encoding of each of its buckets, so the length of a difference is not known here
        num_bytes = len(request.payload) if not self._layouts else 0 if base is not None else self.manifest.total_bytes
        return WeightUpdate(
            version=request.version,
            slot=request.slot,
            path=sent.path,
            manifest=self.manifest,
            checksums=sent.checksums if self._layouts else tuple(request.checksums),
            layouts=self._layouts,
            base=base,
            num_bytes=num_bytes,
            to=tuple(address for address in request.to if address not in sent.missed_by),
            missed_by=dict(sent.missed_by),
            note=sent.note,
            adapter=f"adapter-v{request.version}" if self._codec.adapters_only else "",
        )


def _grouped(views: list[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Return ``views``, one for each part, grouped by tensor. ``counts`` is the number of consecutive parts of each
    tensor."""
    rest = iter(views)
    return [[next(rest) for _ in range(count)] for count in counts]
