"""What each transport refuses, and what it says of the other side when that is silent or gone."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import safetensors
import safetensors.torch
import torch

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, NeedsFull, WeightsError
from headrace.base.types.weights import BUCKET_BYTES
from headrace.sync import http as uploads
from headrace.sync.config import TRANSPORTS, Route, SyncConfig
from headrace.sync.transports import make_publisher, make_receiver
from headrace.testing.sync import TOKEN, Pair, are_equal, open_pair

torch.set_num_threads(1)


@contextmanager
def pair_of(transport: str, place: Path, **changes: object) -> Iterator[Pair]:
    with open_pair(Route(transport=transport, address=str(place), **changes), seed=3) as made:
        yield made


@pytest.mark.parametrize("size", [0, 1, 100, 10**6])
def test_file_that_is_cut_off_or_too_long_is_refused_and_repaired(tmp_path: Path, size: int) -> None:
    with pair_of("files", tmp_path / "folder") as pair:
        update = pair.publish()
        os.truncate(tmp_path / "folder" / update.path, size)
        with pytest.raises(NeedsFull, match=f"holds {size} bytes, expected were"):
            pair.receiver.stage(update)
        pair.receiver.stage(pair.resend())
        pair.receiver.commit(0)
        assert are_equal(pair.engine, pair.expected_weights())


def test_file_of_a_whole_version_is_read_by_whatever_reads_safetensors(tmp_path: Path) -> None:
    for codec in ("full", "cast_bf16", "cast_fp8"):
        with pair_of("files", tmp_path / codec, codec=codec) as pair:
            path = tmp_path / codec / pair.publish().path
            found = safetensors.torch.load_file(path)
            with safetensors.safe_open(path, "pt") as opened:
                assert opened.metadata() == {"format": "pt", "version": "0"}
            if codec == "full":
                assert are_equal(found, pair.learner)
            else:
                expected = [(e.name, e.dtype, e.shape) for e in pair.publisher.manifest.entries]
                assert sorted(expected) == sorted((n, str(t.dtype)[6:], tuple(t.shape)) for n, t in found.items())


def test_file_that_begins_otherwise_is_refused_and_repaired(tmp_path: Path) -> None:
    with pair_of("files", tmp_path / "folder") as pair:
        update = pair.publish()
        with (tmp_path / "folder" / update.path).open("r+b") as file:
            file.seek(20)
            file.write(b"?")
        with pytest.raises(NeedsFull, match="does not begin as version 0 does"):
            pair.receiver.stage(update)
        pair.receiver.stage(pair.resend())


def test_file_has_its_name_only_when_it_is_whole_and_old_ones_go(tmp_path: Path) -> None:
    with pair_of("files", tmp_path / "folder") as pair:
        for _ in range(5):
            pair.transfer()
            names = sorted(path.name for path in (tmp_path / "folder").iterdir())
            assert [name[:9] for name in names] == [f"v{v:08d}" for v in range(pair.version + 1)][-2:]
    assert list((tmp_path / "folder").iterdir()) == []


def test_files_that_a_killed_run_left_are_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    left = ("v00000003-0123abcd.safetensors", "v00000003-0123abcd.delta", ".v00000004-0123abcd.delta.part")
    for name in (*left, "v1.delta"):
        (tmp_path / "folder" / name).touch()
    with pair_of("files", tmp_path / "folder"):
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["v1.delta"]


def test_version_that_does_not_fit_the_disk_leaves_nothing_there(tmp_path: Path) -> None:
    with pair_of("files", tmp_path / "folder") as pair:
        pair.transfer()
        names, limits = os.listdir(tmp_path / "folder"), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(WeightsError, match="version 1 cannot be written"):
                pair.publish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.listdir(tmp_path / "folder") == names
        pair.transfer()


def test_version_that_somebody_removed_hinders_no_later_one(tmp_path: Path) -> None:
    with pair_of("files", tmp_path / "folder") as pair:
        for _ in range(4):
            update = pair.publish()
            pair.receiver.stage(update)
            pair.receiver.commit(pair.version)
            (tmp_path / "folder" / update.path).unlink()
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", ".hidden", "a\\b", "s3://elsewhere/x"])
def test_file_outside_the_folder_is_never_opened(tmp_path: Path, path: str) -> None:
    with pair_of("files", tmp_path / "folder") as pair:
        update = msgspec.structs.replace(pair.publish(), path=path)
        with pytest.raises(WeightsError, match="which is not one of"):
            pair.receiver.stage(update)


def test_files_travel_through_any_file_system_of_fsspec() -> None:
    with pair_of("files", Path()) as _, open_pair(Route(transport="files", address="memory://weights"), seed=3) as pair:
        pair.transfer()
        assert are_equal(pair.engine, pair.expected_weights())
    with pytest.raises(ConfigError, match="cannot be reached"):
        make_receiver(Route(transport="files", address="gopher://x"), {})


def test_upload_with_another_token_is_refused_and_stores_nothing() -> None:
    route = Route(transport="http", deadline_s=5.0)
    with open_pair(route, seed=3) as pair:
        stranger = make_publisher(route, pair.learner, "a guess")
        stranger.copy(0)
        with pytest.raises(WeightsError, match=r"refused version 0 at byte 0 of \d+: 401 Unauthorized"):
            stranger.announce(0, 0, [pair.receiver.address])
        pair.transfer()
        assert are_equal(pair.engine, pair.expected_weights())
    with pytest.raises(ConfigError, match="has no token"):
        make_receiver(route, {})


def test_learner_hears_why_a_long_upload_was_refused() -> None:
    route = Route(transport="http", deadline_s=5.0)
    large = {"w": torch.zeros(BUCKET_BYTES // 4)}
    for token, why in (("a guess", "401 Unauthorized"), (TOKEN, "413 an update of this model has at most")):
        receiver = make_receiver(route, {"w": torch.zeros(7)}, TOKEN)
        publisher = make_publisher(route, large, token)
        publisher.copy(0)
        for _ in range(3):
            with pytest.raises(WeightsError, match=f"refused version 0 at byte 0 of {BUCKET_BYTES}: {why}"):
                publisher.announce(0, 0, [receiver.address])
        receiver.close()


def test_uploads_are_taken_at_the_address_that_is_named_and_nowhere_without_a_token() -> None:
    route = Route(transport="http", host="127.0.0.2", deadline_s=5.0)
    with open_pair(route, seed=3) as pair:
        assert pair.receiver.address.startswith("http://127.0.0.2:")
        pair.transfer()
        assert are_equal(pair.engine, pair.expected_weights())
    with pytest.raises(ConfigError, match=r"no token, and would take anybody's weights at 127\.0\.0\.2"):
        make_receiver(route, {})
    with pytest.raises(ConfigError, match=r"sync\.host='192\.0\.2\.1': the engine cannot listen there"):
        make_receiver(msgspec.structs.replace(route, host="192.0.2.1"), {}, TOKEN)


def test_upload_that_begins_anew_takes_the_place_of_one_that_hangs() -> None:
    inbox = uploads.HttpInbox(TOKEN, 1000, 5.0)
    hangs, again = inbox.begin_bucket("1-a", 0, 100), inbox.begin_bucket("1-b", 0, 100)
    assert not isinstance(hangs, str)
    assert not isinstance(again, str)
    inbox.end_bucket(hangs, 100)
    assert (inbox._upload, again.received) == (again, 0)
    inbox.close()


KEY = "/weights/1-0123456789abcdef"


@pytest.mark.parametrize(
    ("path", "start", "total", "body", "status"),
    [
        (KEY, "0", "100000000000", 1, 413),
        (KEY, "0", "100", 99, 400),
        (KEY, "7", "100", 93, 409),
        (KEY, "-1", "100", 100, 400),
        (KEY, "0", "1e3", 100, 400),
        (KEY, "", "100", 100, 400),
        ("/weights/../1", "0", "100", 100, 400),
        ("/other", "0", "100", 100, 400),
    ],
)
def test_upload_that_makes_no_sense_is_refused_before_memory_is_taken(
    path: str, start: str, total: str, body: int, status: int
) -> None:
    inbox = uploads.HttpInbox(TOKEN, 1000, 5.0)
    place = urlsplit(inbox.address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=5)
    headers = {"Authorization": f"Bearer {TOKEN}", "Upload-Offset": start, "Upload-Length": total}
    connection.request("PUT", path, bytes(body), headers)
    assert connection.getresponse().status == status
    connection.close()
    assert inbox._upload is None
    inbox.close()


def test_upload_that_stops_is_named_with_what_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BUCKET_BYTES", 4096)
    with open_pair(Route(transport="http", deadline_s=0.3), seed=3) as pair:
        update = pair.publish()
        inbox = pair.inbox._inbox
        inbox._upload.received -= 4096  # as if the learner had died before its last bucket
        with pytest.raises(NeedsFull, match=rf"of {update.num_bytes} bytes; after 0.3 s here are \d+ bytes of upload"):
            pair.receiver.stage(update)
        pair.receiver.stage(pair.resend())
        pair.receiver.commit(0)
        assert are_equal(pair.engine, pair.expected_weights())


def test_silent_engines_cost_one_deadline_together_and_the_others_get_the_version() -> None:
    deadline_s = 0.5
    tensors = {"w": torch.arange(5000.0)}
    receiver = make_receiver(Route(transport="http", deadline_s=5.0), {"w": torch.zeros(5000)}, TOKEN)
    publisher = make_publisher(Route(transport="http", deadline_s=deadline_s), tensors, TOKEN)
    publisher.copy(0)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]  # they never answer
        others = [f"http://127.0.0.1:{server.getsockname()[1]}" for server in silent]
        start_s = RealClock().now()
        update = publisher.announce(1, 0, [*others, receiver.address])
        assert RealClock().now() - start_s < 3 * deadline_s
    assert update.to == (receiver.address,)
    assert list(update.missed_by) == others
    assert all(f"could not be uploaded to {url}, which may be silent" in why for url, why in update.missed_by.items())
    receiver.stage(update)
    receiver.close()


def test_engine_that_is_gone_is_named_by_the_learner() -> None:
    with open_pair(Route(transport="http", deadline_s=1.0), seed=3) as pair:
        address = pair.receiver.address
        pair.receiver.close()
        with pytest.raises(WeightsError, match=f"could not be uploaded to {address}, which may be silent .* 1 s"):
            pair.publish()


LEARNER = """
import sys, torch
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher
from headrace.sync import groups
torch.set_num_threads(1)
whole = groups.ProcessGroup.broadcast
def dies(self, buffer):
    whole(self, buffer[: 16 << 20])
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "dies":
    groups.ProcessGroup.broadcast = dies
weights = {"w": torch.ones(5000, 1000)}
publisher = make_publisher(Route(transport="group", address=sys.argv[1], deadline_s=20.0), weights)
publisher.copy(0)
import msgspec
sys.stdout.buffer.write(msgspec.json.encode(publisher.announce(0, 0, [sys.argv[2]])) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("fate", ["lives", "dies"])
def test_learner_that_is_killed_in_a_transfer_is_noticed_at_once(tmp_path: Path, fate: str) -> None:
    from headrace.base.types.weights import WeightUpdate

    engine = {"w": torch.zeros(5000, 1000)}
    receiver = make_receiver(Route(transport="group", address=str(tmp_path), deadline_s=20.0), engine)
    arguments = [sys.executable, "-c", LEARNER, str(tmp_path), receiver.address, fate]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as learner:
        assert learner.stdout is not None
        update = msgspec.json.decode(learner.stdout.readline(), type=WeightUpdate)
        if fate == "dies":
            with pytest.raises(NeedsFull, match=r"version 0 .* did not arrive within 20 s"):
                receiver.stage(update)
            assert learner.wait(20) == -signal.SIGKILL
        else:
            receiver.stage(update)
            receiver.commit(0)
        assert engine["w"].any() == (fate == "lives")
        learner.kill()


def test_the_former_name_of_groups_is_refused_with_the_present_one() -> None:
    with pytest.raises(ConfigError, match=r"sync\.transport='collective' has another name now: group") as refused:
        TRANSPORTS.load("collective")
    assert refused.value.remedy == "write group"


def test_an_address_where_no_engine_could_meet_the_learner_is_refused() -> None:
    with pytest.raises(ValueError, match="is not an address that an engine could connect to"):
        SyncConfig.model_validate({"transport": "group", "host": "0.0.0.0"})
    with pytest.raises(ConfigError, match="the learner cannot listen there"):
        make_publisher(Route(transport="group", host="192.0.2.1"), {"w": torch.ones(2)})


def test_group_without_a_receiver_is_refused_by_the_learner(tmp_path: Path) -> None:
    publisher = make_publisher(Route(transport="group", address=str(tmp_path)), {"w": torch.ones(2)})
    publisher.copy(0)
    with pytest.raises(WeightsError, match="no receiver"):
        publisher.announce(0, 0)
    publisher.close()


def test_group_that_this_engine_is_no_member_of_is_refused(tmp_path: Path) -> None:
    with pair_of("group", tmp_path, deadline_s=2.0) as pair:
        update = msgspec.structs.replace(pair.publish(), path="127.0.0.1|1|0badcafe|somebody,else")
        with pytest.raises(WeightsError, match="is sent to somebody, else, and this engine is"):
            pair.receiver.stage(update)
        pair.receiver.stage(pair.resend())


def test_two_engines_get_the_same_version_from_one_learner(tmp_path: Path) -> None:
    import threading

    route = Route(transport="group", address=str(tmp_path), deadline_s=20.0)
    learner = {"w": torch.arange(1000.0)}
    engines = [{"w": torch.zeros(1000)} for _ in range(2)]
    receivers = [make_receiver(route, engine) for engine in engines]
    publisher = make_publisher(route, learner)
    for version in range(3):
        learner["w"] += 1
        publisher.copy(version % 2)
        update = publisher.announce(version, version % 2, [receiver.address for receiver in receivers])
        threads = [threading.Thread(target=receiver.stage, args=(update,)) for receiver in receivers]
        for thread in threads:
            thread.start()
        for thread, receiver in zip(threads, receivers, strict=True):
            thread.join()
            receiver.commit(version)
        assert all(torch.equal(engine["w"], learner["w"]) for engine in engines)
    publisher.close()


@pytest.mark.parametrize(
    "changes",
    [{"num_bytes": 0}, {"num_bytes": -8}, {"offset_bytes": -64}, {"offset_bytes": 3}, {"offset_bytes": 1 << 60}],
)
def test_tensors_that_lie_where_they_cannot_are_refused_before_anything_is_read(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    with pair_of("shm", tmp_path / "weights") as pair:
        update = pair.publish()
        manifest = update.manifest
        for at in range(len(manifest.entries)):
            entries = list(manifest.entries)
            entries[at] = msgspec.structs.replace(entries[at], **changes)
            forged = msgspec.structs.replace(manifest, entries=tuple(entries))
            with pytest.raises(WeightsError, match="do not lie one after the other"):
                pair.receiver.stage(msgspec.structs.replace(update, manifest=forged))
        twice = msgspec.structs.replace(manifest, entries=(*manifest.entries, manifest.entries[0]))
        with pytest.raises(WeightsError, match="do not lie one after the other"):
            pair.receiver.stage(msgspec.structs.replace(update, manifest=twice))
        pair.receiver.stage(update)


def test_second_learner_is_refused_the_buffer_that_another_one_fills(tmp_path: Path) -> None:
    with pair_of("shm", tmp_path / "weights") as pair:
        pair.transfer()
        with pytest.raises(WeightsError, match="holds the weights of another learner"):
            make_publisher(pair.route, pair.learner)
        pair.transfer()
        assert are_equal(pair.engine, pair.expected_weights())


def test_difference_in_shared_memory_lies_in_the_one_file_that_a_run_has(tmp_path: Path) -> None:
    with pair_of("shm", tmp_path / "weights", codec="delta") as pair:
        for _ in range(3):
            pair.learn()
            pair.transfer()
        assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"num_bytes": 7}, {"base": 0, "num_bytes": 10**15}, {"num_bytes": -1}])
def test_sizes_that_cannot_be_are_refused_before_memory_is_taken(tmp_path: Path, changes: dict[str, int]) -> None:
    with pair_of("files", tmp_path) as pair, pytest.raises(WeightsError, match="is announced with"):
        pair.receiver.stage(msgspec.structs.replace(pair.publish(), **changes))
