"""The contract of transports and codecs of weights, as checks that a test calls, for the transports and codecs of this
library and of other packages.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check, tmp_path):
        with open_pair(Route(transport="mine", codec="delta", address=str(tmp_path)), seed=1) as pair:
            check(pair)

The learner publishes its weights as a new version. The engine's side stages the version (fetches and verifies it) and
commits it (uses it). The codec encodes the tensors, either as whole tensors or as the difference from the last version.
An inbox receives the encoded bytes, called the payload; the checks use a :class:`FaultyInbox`, which can flip bits of
the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.weights import WeightUpdate
from headrace.sync.base import Codec, Inbox, Phase
from headrace.sync.codecs import get_codec
from headrace.sync.config import TRANSPORTS, Route
from headrace.sync.manifest import private_memory
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver
from headrace.sync.transports import make_publisher

TOKEN = "a token of this run"
"""The run's token: the secret of both sides for transports over a network."""
Weights = dict[str, Tensor]
"""The tensors of one side, by name."""


class FaultyInbox:
    """An inbox that returns the payloads of another inbox, with one flipped bit if a test requests it."""

    def __init__(self, inbox: Inbox, rng: np.random.Generator) -> None:
        """Create the inbox. ``inbox`` is the inbox that receives the payloads, and ``rng`` draws the bit that is
        flipped."""
        self._inbox, self._rng = inbox, rng
        self.flip_next = False
        """Whether to flip one bit of the next payload. A flip sets it to false."""

    @property
    def address(self) -> str:
        """The address of the inner inbox, to which the learner sends."""
        return self._inbox.address

    @property
    def lasting(self) -> bool:
        """Whether the inner inbox uses the same memory for every version in a slot (buffer), so that views into it stay
        valid."""
        return self._inbox.lasting

    def view(self, update: WeightUpdate) -> memoryview | None:
        """Return a view of the payload of ``update``; if a bit is flipped, a view of a copy, so that other readers are
        not affected. ``None`` if the payload has to be fetched."""
        payload = self._inbox.view(update)
        if payload is None or not self.flip_next:
            return payload
        copied = private_memory(len(payload))
        copied[:] = payload
        self._flip(update, copied)
        return copied

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Copy the payload of ``update`` into ``into``, and flip one bit there if a test has requested it."""
        self._inbox.fetch(update, into)
        if self.flip_next:
            self._flip(update, into)

    def skip(self, update: WeightUpdate) -> None:
        """Release the payload of ``update``, which the receiver has refused and does not fetch."""
        self._inbox.skip(update)

    def close(self) -> None:
        """Close the inner inbox."""
        self._inbox.close()

    def _flip(self, update: WeightUpdate, payload: memoryview) -> None:
        """Flip one random bit of the payload of ``update`` in place, which the receiver has to detect, and set
        :attr:`flip_next` to false."""
        self.flip_next = False
        place = int(self._rng.integers(len(payload)))
        # choose a bit of a tensor, because a flip in the padding between tensors has no effect
        if update.base is None or update.layouts:
            entry = max(update.manifest.entries, key=lambda entry: entry.num_bytes)
            place = entry.offset_bytes + place % entry.num_bytes
        payload[place] ^= 1 << int(self._rng.integers(8))


@dataclass(slots=True, kw_only=True)
class Pair:
    """Both sides of a transport, the learner's and the engine's, with small weights. Every check receives one."""

    route: Route
    """The transport and the codec under test, and the address of payloads."""
    rng: np.random.Generator
    """The random generator of the checks."""
    learner: Weights
    """The weights of the learner."""
    engine: Weights
    """The weights in use by the engine, which commits change in place."""
    publisher: Publisher
    """The learner's side of the transport."""
    receiver: Receiver
    """The engine's side of the transport."""
    inbox: FaultyInbox
    """The inbox of the receiver."""
    version: int = -1
    """The version that was published last; −1 before the first version."""
    slot: int = 1
    """The publisher's buffer, 0 or 1, that contains this version."""

    @property
    def codec(self) -> Codec:
        """The codec of both sides, which encodes and decodes the weights."""
        return get_codec(self.route.codec)

    @torch.no_grad()
    def learn(self) -> Weights:
        """Change some of the learner's weights a little, in place, as a training step does, and return the weights that
        the engine must have after the next transfer."""
        for tensor in self.learner.values():
            flat = tensor.view(-1)
            places = torch.from_numpy(self.rng.permutation(flat.numel())[: 1 + flat.numel() // 8])
            flat[places] += torch.from_numpy(self.rng.normal(size=len(places)) * 0.01).to(flat.dtype)
        return self.expected_weights()

    def expected_weights(self) -> Weights:
        """Return the weights that the engine must have after the next transfer: the learner's weights, encoded and
        decoded by the codec, which may round them."""
        return {name: encode_and_decode(self.codec, name, tensor) for name, tensor in self.learner.items()}

    def publish(self) -> WeightUpdate:
        """Publish the learner's weights as the next version, in the buffer that the last version does not use, and
        return the update to stage."""
        self.version, self.slot = self.version + 1, 1 - self.slot
        self.publisher.copy(self.slot)
        return self.publisher.announce(self.version, self.slot, [self.receiver.address])

    def resend(self) -> WeightUpdate:
        """Send the last version again, as whole tensors instead of differences, and return the update to stage."""
        return self.publisher.resend(self.version, self.slot, [self.receiver.address])

    def stage(self, update: WeightUpdate) -> bool:
        """Stage ``update`` as a controller does: if the receiver refuses the payload, send the version again as whole
        tensors and stage it. Return whether it was sent again."""
        try:
            self.receiver.stage(update)
        except NeedsFull:
            self.receiver.stage(self.resend())
            return True
        return False

    def transfer(self) -> None:
        """Publish the learner's weights as the next version, and stage and commit it on the engine's side."""
        self.stage(self.publish())
        self.receiver.commit(self.version)

    def restart_engine(self) -> None:
        """Replace the engine's side by a new one, as after a restart of the engine: its weights are 0, and it has no
        version."""
        self.receiver.close()
        self.engine = {name: torch.zeros_like(tensor) for name, tensor in self.engine.items()}
        self.receiver, self.inbox = receiver_with_faults(self.route, self.engine, self.rng)


def encode_and_decode(codec: Codec, name: str, tensor: Tensor) -> Tensor:
    """Return ``tensor``, whose name is ``name``, after ``codec`` has encoded and decoded it as a whole tensor. A lossy
    codec rounds it."""
    parts = [torch.empty(part.shape, dtype=part.dtype) for part in codec.form.parts(name, tensor).values()]
    codec.form.write(parts, tensor)
    decoded = torch.empty_like(tensor)
    codec.form.read(parts, decoded)
    return decoded


def receiver_with_faults(
    route: Route, engine: Mapping[str, Tensor], rng: np.random.Generator
) -> tuple[Receiver, FaultyInbox]:
    """Return a new receiver for ``route``, which changes the tensors ``engine`` in place, and its inbox, which can flip
    bits that ``rng`` draws."""
    inboxes: list[FaultyInbox] = []

    def open_inbox(limit_bytes: int) -> Inbox:
        """Return the transport's inbox for payloads of at most ``limit_bytes``, inside of a :class:`FaultyInbox`."""
        inboxes.append(FaultyInbox(TRANSPORTS.load(route.transport).open_inbox(route, TOKEN, limit_bytes), rng))
        return inboxes[0]

    return Receiver(engine, get_codec(route.codec), open_inbox), inboxes[0]


@contextmanager
def open_pair(route: Route, seed: int) -> Iterator[Pair]:
    """Yield both sides of the transport that ``route`` describes, with small random weights, and close them at the end
    of the context. All random numbers follow from ``seed``."""
    rng = np.random.default_rng(seed)
    learner, engine = _weights(rng), _weights(rng)
    publisher = make_publisher(route, learner, TOKEN)
    receiver, inbox = receiver_with_faults(route, engine, rng)
    pair = Pair(
        route=route, rng=rng, learner=learner, engine=engine, publisher=publisher, receiver=receiver, inbox=inbox
    )
    try:
        yield pair
    finally:
        pair.receiver.close()
        publisher.close()


def are_equal(left: Weights, right: Weights) -> bool:
    """Return whether two sets of weights have the same names, dtypes and values, bit for bit."""
    return all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left.keys() | right
    )


def check_transferred_weights(pair: Pair) -> None:
    """Check over four versions that after a commit the engine has exactly the weights that result from the codec."""
    for _ in range(4):
        expected = pair.learn()
        pair.transfer()
        assert are_equal(pair.engine, expected)
        assert (pair.receiver.phase, pair.receiver.committed) == (Phase.COMMITTED, pair.version)


def check_staging_changes_nothing(pair: Pair) -> None:
    """Check that staging a new version does not change the weights that the engine uses, and that the commit does."""
    pair.transfer()
    before = {name: tensor.clone() for name, tensor in pair.engine.items()}
    expected = pair.learn()
    pair.stage(pair.publish())
    assert pair.receiver.phase is Phase.VERIFIED
    assert are_equal(pair.engine, before)
    pair.receiver.commit(pair.version)
    assert are_equal(pair.engine, expected)


def check_old_versions_are_refused(pair: Pair) -> None:
    """Check that a version that is not newer than the committed version is refused, and that the next newer version is
    accepted afterwards."""
    pair.transfer()
    pair.version -= 1
    update = pair.publish()
    words = f"version {pair.version} is not newer than the committed version {pair.version}"
    _assert_refused(partial(pair.receiver.stage, update), words)
    assert pair.receiver.phase is Phase.REFUSED
    pair.version += 1
    expected = pair.learn()
    pair.transfer()
    assert are_equal(pair.engine, expected)


def check_only_staged_versions_are_committed(pair: Pair) -> None:
    """Check that neither a version that is not staged nor a version that is already in use can be committed."""
    _assert_refused(partial(pair.receiver.commit, 0), "nothing is staged")
    pair.stage(pair.publish())
    _assert_refused(partial(pair.receiver.commit, 1), "commit of version 1, but version 0 is staged")
    pair.receiver.commit(0)
    _assert_refused(partial(pair.receiver.commit, 0), "nothing is staged")


def check_flipped_bit_is_refused_and_repaired(pair: Pair) -> None:
    """Check that a damaged version is refused and changes nothing, and that it can be committed after it was sent again
    as whole tensors. The check covers the first version, and a version that may be a difference."""
    for _ in range(2):
        before = {name: tensor.clone() for name, tensor in pair.engine.items()}
        expected = pair.learn()
        update, pair.inbox.flip_next = pair.publish(), True
        _assert_refused(partial(pair.receiver.stage, update))
        assert pair.receiver.phase is Phase.NEEDS_FULL
        assert are_equal(pair.engine, before)
        _assert_refused(partial(pair.receiver.commit, pair.version), "nothing is staged")
        pair.receiver.stage(pair.resend())
        pair.receiver.commit(pair.version)
        assert are_equal(pair.engine, expected)


def check_no_difference_after_a_failure(pair: Pair) -> None:
    """Check that the version after a damaged version is accepted only as whole tensors, because the engine lacks the
    base of the difference, and that the version after that is accepted as a difference again."""
    pair.transfer()
    pair.learn()
    update, pair.inbox.flip_next = pair.publish(), True
    _assert_refused(partial(pair.receiver.stage, update))
    for whole in (pair.codec.differences, False):
        expected = pair.learn()
        assert pair.stage(pair.publish()) is whole
        pair.receiver.commit(pair.version)
        assert are_equal(pair.engine, expected)


def check_model_differences_are_listed(pair: Pair) -> None:
    """Check that an update whose tensors differ from the engine's in names, shapes or dtypes is refused before any
    payload is fetched, with a list of all differences."""
    other = {name: tensor.clone() for name, tensor in pair.learner.items()}
    other["lora_B.more"] = torch.zeros(1)
    other["lora_A.shift"] = other["lora_A.shift"].int()
    other["lora_A.wide"] = torch.zeros(2, 2)
    del other["lora_B.scale"]
    route = msgspec.structs.replace(pair.route, address=f"{pair.route.address}-other")
    publisher = make_publisher(route, other, TOKEN)
    publisher.close()
    update = WeightUpdate(version=0, slot=0, path="", manifest=publisher.manifest, checksums=())
    lines = ("lora_B.more: not a tensor", "lora_A.shift: int32[3]", "lora_A.wide:", "lora_B.scale: missing")
    _assert_refused(partial(pair.receiver.stage, update), *lines)
    pair.transfer()


def check_engine_restart(pair: Pair) -> None:
    """Check that an engine receives the next version after it was restarted between two versions, and after it was
    restarted between staging and commit."""
    for staged in (False, True):
        pair.transfer()
        pair.learn()
        if staged:
            pair.stage(pair.publish())
        pair.restart_engine()
        expected = pair.learn()
        pair.transfer()
        assert are_equal(pair.engine, expected)


def check_no_partial_version_is_used(pair: Pair) -> None:
    """Check over 20 versions, with random flipped bits and restarts of the engine, that staging does not change the
    weights in use and that each commit makes the engine use exactly the committed version."""
    in_use, num_flipped = {name: tensor.clone() for name, tensor in pair.engine.items()}, 0
    for _ in range(20):
        draw = pair.rng.random()
        if draw < 0.1:
            pair.restart_engine()
            in_use = {name: tensor.clone() for name, tensor in pair.engine.items()}
        expected = pair.learn()
        update, pair.inbox.flip_next = pair.publish(), draw > 0.7
        flipped = pair.inbox.flip_next
        sent_again = pair.stage(update)
        assert sent_again or not flipped
        num_flipped += flipped
        assert are_equal(pair.engine, in_use)
        pair.receiver.commit(pair.version)
        assert are_equal(pair.engine, expected)
        in_use = expected
    assert num_flipped


CHECKS: tuple[Callable[[Pair], None], ...] = (
    check_transferred_weights,
    check_staging_changes_nothing,
    check_old_versions_are_refused,
    check_only_staged_versions_are_committed,
    check_flipped_bit_is_refused_and_repaired,
    check_no_difference_after_a_failure,
    check_model_differences_are_listed,
    check_engine_restart,
    check_no_partial_version_is_used,
)
"""All checks of the contract."""


def _weights(rng: np.random.Generator) -> Weights:
    """Return random tensors with the names of an adapter's tensors and different shapes and dtypes, for one side of a
    transport."""

    def numbers(*shape: int) -> Tensor:
        """Return a float32 tensor of this shape with normally distributed numbers."""
        return torch.from_numpy(rng.normal(size=shape)).float()

    return {
        "lora_A.wide": numbers(33, 40).to(torch.bfloat16),
        "lora_A.shift": numbers(3),
        "lora_B.deep": numbers(5, 7, 2),
        "lora_B.scale": numbers(1).reshape(()),
        "lora_B.long": numbers(3000).to(torch.bfloat16),
    }


def _assert_refused(act: Callable[[], object], *words: str) -> None:
    """Assert that ``act``, which stages or commits a version, is refused with an error that contains all of
    ``words``."""
    problem = None
    try:
        act()
    except WeightsError as refusal:
        problem = refusal.problem
    assert problem is not None, f"{act} was not refused"
    missing = [word for word in words if word not in problem]
    assert not missing, f"{missing} not in: {problem}"
