"""Messages to bytes and back; no bytes, however hostile, do anything but raise an error of msgspec."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.base.types.batch import Batch
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages import controller, engine, environment, learner, node, rollout, scorer
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import CallScores, Chunks, EngineStats, LogprobsReply, Ready, Scored
from headrace.base.types.messages.engine import Generate, GenerateRequest, Stage
from headrace.base.types.messages.learner import Logprobs, Train
from headrace.base.types.messages.parts import MessagePart
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.base.types.outline import BatchOutline, GroupOutline
from headrace.base.types.sampling import Sampling
from headrace.base.types.stored import StoredRows
from headrace.base.types.tokens import Tokens
from headrace.base.types.trace import Span
from headrace.base.types.weights import Manifest, TensorEntry, WeightUpdate

REFUSED = (msgspec.DecodeError, msgspec.ValidationError)
RECEIVERS = (controller, engine, environment, learner, node, rollout, scorer)
IDS = np.array([1, 2, 3], np.int32)
BATCH = Batch(
    step=3,
    lengths_S=np.array([3], np.int32),
    groups_S=np.zeros(1, np.int32),
    episodes_S=np.zeros(1, np.int32),
    ids_N=IDS,
    mask_N=np.array([False, True, True]),
    logprobs_N=np.array([0.0, -1.5, np.nan], np.float32),
    versions_N=np.array([-1, 2, 3], np.int32),
    advantages_N=np.ones(3, np.float32),
)
OUTLINE = BatchOutline(
    step=3,
    groups=tuple(
        GroupOutline(
            number=number,
            places=(0, 2),
            entries=(0, 1),
            credits=(0.5, (0.25, -1.0)),
            columns=columns,
            num_tokens=9,
            num_loss_tokens=4,
        )
        for number, columns in enumerate((memoryview(b"turns"), StoredRows("ready.000000", 8, 16, 2**64 - 1, 0, 16)))
    ),
    agents=("critic",),
)
PART = MessagePart(of=1, number=0, num_parts=2, data=memoryview(b"half"))
ENTRY = TensorEntry(name="w", dtype="bfloat16", shape=(2, 3), offset_bytes=0, num_bytes=12)
UPDATE = WeightUpdate(
    version=2, slot=1, path="/dev/shm/w", manifest=Manifest(entries=(ENTRY,), total_bytes=64), checksums=(2**64 - 1,)
)
MESSAGES = [
    (controller, Ready(token="t", pid=3, facts={"dtype": "float32", "tok_s": 1.5})),
    (
        controller,
        Chunks(
            chunks=(
                TokenChunk(
                    request_id=1,
                    tokens=Tokens(ids_T=IDS, logprobs_T=-IDS.astype(np.float32), versions_T=IDS),
                    stop_reason=StopReason.LENGTH,
                ),
            ),
            stats=EngineStats(version=4, busy_s=0.5),
            spans=(Span(lane="engine", name="generate", start_s=0.0, end_s=1.0),),
        ),
    ),
    (controller, LogprobsReply(call=1, logprobs_N=np.zeros(0, np.float32))),
    (controller, Scored(call=1, calls=(CallScores(rewards=(0.5, None)), CallScores(rewards=(), error="no")))),
    (
        engine,
        Generate(
            requests=(
                GenerateRequest(request_id=1, prompt_ids_T=IDS, sampling=Sampling(max_new_tokens=2, stop_ids=(1, 2))),
            )
        ),
    ),
    (engine, Stage(call=1, update=UPDATE)),
    (learner, Logprobs(call=1, batch=BATCH)),
    (learner, Train(call=1, outline=OUTLINE)),
    (learner, PART),
    (controller, PART),
    (
        scorer,
        ScoreCompletions(
            call=1, prompt=[{"role": "user", "content": "?"}], completions=("a", "b"), row={"x": [1, None]}
        ),
    ),
]


def plain(value: Any) -> Any:
    """A message as something that compares, arrays by their bytes."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, msgspec.Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return (type(value).__name__, fields)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize(("receiver", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_message_comes_back_as_it_was(receiver: Any, message: Any) -> None:
    codec = MessageCodec(receiver.Message)
    assert plain(codec.decode(codec.encode(message))) == plain(message)


@pytest.mark.parametrize("dtype", ["|b1", "|u1", "<u2", "<i4", "<i8", "<f4", "<f8"])
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3), ()])
def test_array_of_every_kind_travels_as_raw_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    codec = MessageCodec(np.ndarray)
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    assert plain(codec.decode(codec.encode(array))) == plain(array)


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)))
def test_any_array_travels_bit_for_bit(array: np.ndarray) -> None:
    codec = MessageCodec(np.ndarray)
    assert plain(codec.decode(codec.encode(array))) == plain(array)


def test_array_in_another_memory_order_travels_by_its_values() -> None:
    codec = MessageCodec(np.ndarray)
    turned = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert codec.decode(codec.encode(turned)).tolist() == turned.tolist()


def test_thing_that_is_no_record_cannot_be_sent() -> None:
    with pytest.raises(NotImplementedError, match="object cannot travel"):
        MessageCodec(scorer.Message).encode(object())


@pytest.mark.parametrize("receiver", RECEIVERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_message_for_another_receiver_is_refused(receiver: Any) -> None:
    mine = {type(message) for owner, message in MESSAGES if owner is receiver}
    codec = MessageCodec(receiver.Message)
    for _, message in MESSAGES:
        if type(message) not in mine:
            with pytest.raises(REFUSED):
                codec.decode(codec.encode(message))


def extension(data: bytes, code: int = 1) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<f4",
        b"<f4:3",
        b"<f4:3|",
        b"<f4:3|123",
        b"<f4:-2|12345678",
        b"<f4:x|1234",
        b"<f4:1,1,1|12345678",
        b"<f4:" + b"9" * 30 + b"|1234",
        b"<f4:" + b"9" * 9000 + b"|1234",
        b"<f4:" + b"1," * 100 + b"|1234",
        b"|O:1|12345678",
        b"|V8:1|12345678",
        b">f4:1|1234",
        b"<M8[s]:1|12345678",
        b"<f4\xff:1|1234",
    ],
)
def test_malformed_array_is_refused(data: bytes) -> None:
    with pytest.raises(REFUSED):
        MessageCodec(np.ndarray).decode(extension(data))


def test_extension_of_another_kind_is_refused() -> None:
    with pytest.raises(REFUSED, match="extension"):
        MessageCodec(np.ndarray).decode(extension(b"<f4:1|1234", code=2))


@pytest.mark.parametrize("deep", [b"\x91" * 200_000, b"\x81\xa1a" * 200_000])
def test_bytes_nested_without_end_are_refused(deep: bytes) -> None:
    with pytest.raises(REFUSED):
        MessageCodec(Any).decode(deep)


def survives(data: bytes) -> None:
    """Decoding it either gives a message or raises an error of msgspec."""
    for receiver in RECEIVERS:
        try:
            MessageCodec(receiver.Message).decode(data)
        except REFUSED:
            continue


@given(st.binary(max_size=200))
@example(b"\xc7\x00\x01")
@example(b"\xd7\xff" + b"\xff" * 8)
def test_random_bytes_only_ever_raise_errors_of_msgspec(data: bytes) -> None:
    survives(data)


@settings(max_examples=400)
@given(
    st.sampled_from([message for _, message in MESSAGES]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 10_000),
)
def test_damaged_message_only_ever_raises_errors_of_msgspec(
    message: Any, flips: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(MessageCodec(Any).encode(message))
    for place, value in flips:
        data[place % len(data)] = value
    survives(bytes(data))
    survives(bytes(data[: length % len(data)]))


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ),
    st.sampled_from(["Train", "Generate", "Chunks", "Score", "Ready", "Stage", "nothing"]),
)
def test_well_formed_nonsense_only_ever_raises_errors_of_msgspec(content: Any, tag: str) -> None:
    survives(msgspec.msgpack.encode(content))
    survives(
        msgspec.msgpack.encode({"type": tag, "call": 1, "outline": content, "requests": [content], "row": content})
    )
