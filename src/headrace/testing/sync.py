"""The contract of every transport with every codec, as checks that a test calls, for ours and for those of a third
party.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check, tmp_path):
        with line(Route(transport="mine", codec="delta", address=str(tmp_path)), seed=1) as pair:
            check(pair)

Between the two sides is a :class:`FaultyInbox` that can flip bits of a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.weights import Manifest, WeightUpdate
from headrace.sync.base import Codec, Inbox, Phase
from headrace.sync.codecs import codec_of
from headrace.sync.config import TRANSPORTS, Route
from headrace.sync.manifest import private_memory
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver
from headrace.sync.transports import make_publisher

TOKEN = "a token of this run"
Weights = dict[str, Tensor]


class FaultyInbox:
    """An inbox whose payloads can arrive with one flipped bit."""

    def __init__(self, inbox: Inbox, rng: np.random.Generator) -> None:
        self._inbox, self._rng = inbox, rng
        self.flip_next = False

    @property
    def address(self) -> str:
        """The address of the inbox behind this one."""
        return self._inbox.address

    @property
    def lasting(self) -> bool:
        """Whether the payloads of the inbox behind this one last."""
        return self._inbox.lasting

    def view(self, update: WeightUpdate) -> memoryview | None:
        """Return the payload, or a copy of it with one flipped bit, so that other readers are not affected."""
        payload = self._inbox.view(update)
        if payload is None or not self.flip_next:
            return payload
        copied = private_memory(len(payload))
        copied[:] = payload
        self._flip(update, copied)
        return copied

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Fetch the payload, then flip one bit."""
        self._inbox.fetch(update, into)
        if self.flip_next:
            self._flip(update, into)

    def skip(self, update: WeightUpdate) -> None:
        """Skip the update."""
        self._inbox.skip(update)

    def close(self) -> None:
        """Close the inbox behind this one."""
        self._inbox.close()

    def _flip(self, update: WeightUpdate, payload: memoryview) -> None:
        """Change one random bit of a payload, which the receiver has to notice."""
        self.flip_next = False
        place = int(self._rng.integers(len(payload)))
        if update.base is None:  # not in the padding between tensors, where it has no effect
            entry = max(update.manifest.entries, key=lambda entry: entry.num_bytes)
            place = entry.offset_bytes + place % entry.num_bytes
        payload[place] ^= 1 << int(self._rng.integers(8))


@dataclass(slots=True, kw_only=True)
class Pair:
    """The learner's and the engine's side of a transport, with some weights."""

    route: Route
    rng: np.random.Generator
    learner: Weights
    engine: Weights
    publisher: Publisher
    receiver: Receiver
    inbox: FaultyInbox
    version: int = -1
    slot: int = 1

    @property
    def codec(self) -> Codec:
        """The codec of both sides."""
        return codec_of(self.route.codec)

    @torch.no_grad()
    def learn(self) -> Weights:
        """Change some of the learner's weights a little, in place, and return the weights that the engine must have
        afterwards."""
        for tensor in self.learner.values():
            flat = tensor.view(-1)
            places = torch.from_numpy(self.rng.permutation(flat.numel())[: 1 + flat.numel() // 8])
            flat[places] += torch.from_numpy(self.rng.normal(size=len(places)) * 0.01).to(flat.dtype)
        return self.expected()

    def expected(self) -> Weights:
        """Return the learner's weights as the codec transmits them."""
        return {name: through(self.codec, name, tensor) for name, tensor in self.learner.items()}

    def publish(self) -> WeightUpdate:
        """Publish the next version, in the other slot."""
        self.version, self.slot = self.version + 1, 1 - self.slot
        self.publisher.copy(self.slot)
        return self.publisher.announce(self.version, self.slot, [self.receiver.address])

    def resend(self) -> WeightUpdate:
        """Publish the same version again, as whole tensors."""
        return self.publisher.resend(self.version, self.slot, [self.receiver.address])

    def stage(self, update: WeightUpdate) -> bool:
        """Stage ``update`` as a controller would: if its bytes are refused, it is sent again as whole tensors. Return
        whether it was sent again."""
        try:
            self.receiver.stage(update)
        except NeedsFull:
            self.receiver.stage(self.resend())
            return True
        return False

    def transfer(self) -> None:
        """Publish, stage and commit one version."""
        self.stage(self.publish())
        self.receiver.commit(self.version)

    def restart_engine(self) -> None:
        """Restart the engine, which loses its weights and its state."""
        self.receiver.close()
        self.engine = {name: torch.zeros_like(tensor) for name, tensor in self.engine.items()}
        self.receiver, self.inbox = receiver_with_faults(self.route, self.engine, self.rng)


def through(codec: Codec, name: str, tensor: Tensor) -> Tensor:
    """Return ``tensor`` as ``codec`` transmits it."""
    parts = [torch.empty(part.shape, dtype=part.dtype) for part in codec.form.parts(name, tensor).values()]
    codec.form.write(parts, tensor)
    out = torch.empty_like(tensor)
    codec.form.read(parts, out)
    return out


def receiver_with_faults(
    route: Route, engine: Mapping[str, Tensor], rng: np.random.Generator
) -> tuple[Receiver, FaultyInbox]:
    """Return the engine's side of ``route``, and the inbox that can flip bits."""
    made: list[FaultyInbox] = []

    def open_inbox(limit_bytes: int) -> Inbox:
        made.append(FaultyInbox(TRANSPORTS.load(route.transport).open_inbox(route, TOKEN, limit_bytes), rng))
        return made[0]

    return Receiver(engine, codec_of(route.codec), open_inbox), made[0]


@contextmanager
def line(route: Route, seed: int) -> Iterator[Pair]:
    """Yield both sides of ``route`` with small weights of an adapter, and close them afterwards."""
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


def equal(left: Weights, right: Weights) -> bool:
    """Return whether the weights are equal bit for bit, including dtypes."""
    return all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left.keys() | right
    )


def brings_what_the_codec_promises(pair: Pair) -> None:
    """Check that the engine gets the transmitted weights, version after version."""
    for _ in range(4):
        expected = pair.learn()
        pair.transfer()
        assert equal(pair.engine, expected)
        assert (pair.receiver.phase, pair.receiver.committed) == (Phase.COMMITTED, pair.version)


def shows_nothing_before_the_commit(pair: Pair) -> None:
    """Check that neither staging nor the learner's next copy changes the weights in use."""
    pair.transfer()
    before = {name: tensor.clone() for name, tensor in pair.engine.items()}
    expected = pair.learn()
    pair.stage(pair.publish())
    assert pair.receiver.phase is Phase.VERIFIED
    assert equal(pair.engine, before)
    pair.receiver.commit(pair.version)
    assert equal(pair.engine, expected)


def refuses_versions_that_are_not_newer(pair: Pair) -> None:
    """Check that older versions are refused and newer ones still work."""
    pair.transfer()
    pair.version -= 1
    _refused(pair, pair.publish(), f"version {pair.version} is not newer than the committed version {pair.version}")
    assert pair.receiver.phase is Phase.REFUSED
    pair.version += 1
    expected = pair.learn()
    pair.transfer()
    assert equal(pair.engine, expected)


def commits_only_what_is_staged(pair: Pair) -> None:
    """Check that versions that were never staged, and one in use, cannot be committed again."""
    _refused_commit(pair, 0, "nothing is staged")
    pair.stage(pair.publish())
    _refused_commit(pair, 1, "commit of version 1, but version 0 is staged")
    pair.receiver.commit(0)
    _refused_commit(pair, 0, "nothing is staged")


def refuses_a_flipped_bit_and_is_repaired_by_the_whole(pair: Pair) -> None:
    """Check the repair in the first version, and in one that may be a difference."""
    for _ in range(2):
        before = {name: tensor.clone() for name, tensor in pair.engine.items()}
        expected = pair.learn()
        update, pair.inbox.flip_next = pair.publish(), True
        _refused(pair, update, "")
        assert pair.receiver.phase is Phase.NEEDS_FULL
        assert equal(pair.engine, before)
        _refused_commit(pair, pair.version, "nothing is staged")
        pair.receiver.stage(pair.resend())
        pair.receiver.commit(pair.version)
        assert equal(pair.engine, expected)


def takes_no_difference_after_a_failure(pair: Pair) -> None:
    """Check that the version after a damaged one is accepted only as whole tensors, and the one after that as a
    difference."""
    pair.transfer()
    pair.learn()
    update, pair.inbox.flip_next = pair.publish(), True
    _refused(pair, update, "")
    for whole in (pair.codec.differences, False):
        expected = pair.learn()
        assert pair.stage(pair.publish()) is whole
        pair.receiver.commit(pair.version)
        assert equal(pair.engine, expected)


def lists_every_difference_of_the_model(pair: Pair) -> None:
    """Check that differences in names, shapes and dtypes are reported before any data moves."""
    other = {name: tensor.clone() for name, tensor in pair.learner.items()}
    other["lora_B.more"] = torch.zeros(1)
    other["lora_A.shift"] = other["lora_A.shift"].int()
    other["lora_A.wide"] = torch.zeros(2, 2)
    del other["lora_B.scale"]
    route = msgspec.structs.replace(pair.route, address=f"{pair.route.address}-other")
    update = WeightUpdate(version=0, slot=0, path="", manifest=_manifest(route, other), checksums=())
    lines = ("lora_B.more: not a tensor", "lora_A.shift: int32[3]", "lora_A.wide:", "lora_B.scale: missing")
    _refused(pair, update, *lines)
    pair.transfer()


def survives_a_restart_of_the_engine(pair: Pair) -> None:
    """Check a restart between two versions, and between staging and commit."""
    for staged in (False, True):
        pair.transfer()
        pair.learn()
        if staged:
            pair.stage(pair.publish())
        pair.restart_engine()
        expected = pair.learn()
        pair.transfer()
        assert equal(pair.engine, expected)


def never_uses_a_version_that_is_half_or_mixed(pair: Pair) -> None:
    """Check that after every attempt, with flipped bits and restarts, the engine has exactly the last committed
    version."""
    held, repaired = {name: tensor.clone() for name, tensor in pair.engine.items()}, 0
    for _ in range(20):
        luck = pair.rng.random()
        if luck < 0.1:
            pair.restart_engine()
            held = {name: tensor.clone() for name, tensor in pair.engine.items()}
        expected = pair.learn()
        update, pair.inbox.flip_next = pair.publish(), luck > 0.7
        flipped = pair.inbox.flip_next
        assert pair.stage(update) or not flipped
        repaired += flipped
        assert equal(pair.engine, held)
        pair.receiver.commit(pair.version)
        assert equal(pair.engine, expected)
        held = expected
    assert repaired


CHECKS: tuple[Callable[[Pair], None], ...] = (
    brings_what_the_codec_promises,
    shows_nothing_before_the_commit,
    refuses_versions_that_are_not_newer,
    commits_only_what_is_staged,
    refuses_a_flipped_bit_and_is_repaired_by_the_whole,
    takes_no_difference_after_a_failure,
    lists_every_difference_of_the_model,
    survives_a_restart_of_the_engine,
    never_uses_a_version_that_is_half_or_mixed,
)
"""All checks of the contract."""


def _weights(rng: np.random.Generator) -> Weights:
    """Return random tensors of different shapes and dtypes."""

    def numbers(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).float()

    return {
        "lora_A.wide": numbers(33, 40).to(torch.bfloat16),
        "lora_A.shift": numbers(3),
        "lora_B.deep": numbers(5, 7, 2),
        "lora_B.scale": numbers(1).reshape(()),
        "lora_B.long": numbers(3000).to(torch.bfloat16),
    }


def _manifest(route: Route, weights: Weights) -> Manifest:
    publisher = make_publisher(route, weights, TOKEN)
    publisher.close()
    return publisher.manifest


def _refused(pair: Pair, update: WeightUpdate, *words: str) -> None:
    """Check that the receiver refuses ``update``, with all of ``words`` in its reason."""
    problem = None
    try:
        pair.receiver.stage(update)
    except WeightsError as refusal:
        problem = refusal.problem
    assert problem is not None, f"version {update.version} was taken"
    missing = [word for word in words if word not in problem]
    assert not missing, f"{missing} not in: {problem}"


def _refused_commit(pair: Pair, version: int, words: str) -> None:
    """Assert that the commit of ``version`` is refused with ``words`` in the problem."""
    problem = None
    try:
        pair.receiver.commit(version)
    except WeightsError as refusal:
        problem = refusal.problem
    assert problem is not None, f"version {version} was committed"
    assert words in problem, problem
