"""Process groups that cannot be mended: the versions go through files then, and nothing else changes."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.weights import WeightUpdate
from headrace.sync import group
from headrace.sync.base import LearnerRank
from headrace.sync.config import Route
from headrace.sync.groups import ProcessGroup, gloo_group
from headrace.sync.pieces import whole_boxes
from headrace.sync.transports import make_publisher, make_receiver
from headrace.testing.sync import Pair, are_equal, open_pair
from headrace.wings.bench.engine_peers import open_worker
from headrace.wings.bench.sync_group import GroupMembers
from headrace.wings.bench.sync_worker import SyncPlan
from tests.run.session.runs import headrace, make_run, tiny_model

torch.set_num_threads(1)
DEADLINE_S = 1.0
UNREACHED_S = 0.5
"""How long members wait for one that never comes, where no group is ever joined."""


class Network:
    """The network between learner and engine, which is cut for the next ``failures`` groups."""

    def __init__(self) -> None:
        self.failures = 0

    def join(self, store: Any, rank_and_size: tuple[int, int], deadline_s: float, host: str) -> ProcessGroup:
        if rank_and_size[0] and self.failures:
            self.failures -= 1
            raise RuntimeError("no route to host")
        return gloo_group(store, rank_and_size, deadline_s, host)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(group, "gloo_group", made.join)
    return made


@pytest.fixture(params=["full", "delta"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, network: Network) -> Iterator[Pair]:
    route = Route(transport="group", codec=request.param, deadline_s=DEADLINE_S, fallback=str(tmp_path / "weights"))
    with open_pair(route, seed=3) as made:
        yield made


@pytest.fixture(params=["full", "delta"])
def unreached(request: pytest.FixtureRequest, tmp_path: Path, network: Network) -> Iterator[Pair]:
    """A pair whose engine never joins a group."""
    network.failures = 1000
    folder = str(tmp_path / "weights")
    codec = request.param
    route = Route(transport="group", codec=codec, deadline_s=DEADLINE_S, silence_s=UNREACHED_S, fallback=folder)
    with open_pair(route, seed=3) as made:
        yield made


def brought(pair: Pair) -> list[WeightUpdate]:
    """Bring the next version to the engine as a run does, and check every bit; the updates that this took."""
    pair.learn()
    updates = [pair.publish()]
    while True:
        try:
            pair.receiver.stage(updates[-1])
            break
        except NeedsFull:
            assert len(updates) < 4
            updates.append(pair.resend())
    pair.receiver.commit(pair.version)
    assert are_equal(pair.engine, pair.expected_weights())
    assert pair.receiver.committed == pair.version
    return updates


def by_files(update: WeightUpdate) -> bool:
    return update.path.startswith("files|")


def test_group_that_is_never_joined_gives_way_to_files_and_says_so_once(unreached: Pair, tmp_path: Path) -> None:
    pair = unreached
    updates = brought(pair)
    assert [by_files(update) for update in updates] == [False, False, True]
    assert "weights go through files from version 0 on" in updates[-1].note
    assert "failed 2 times in a row" in updates[-1].note
    for _ in range(4):
        (update,) = brought(pair)
        assert (by_files(update), update.note) == (True, "")
        assert (update.base is not None) == (pair.route.codec == "delta")
    pair.restart_engine()
    assert all(by_files(update) for update in brought(pair)), "an engine that joins later reads files, too"
    assert len(os.listdir(tmp_path / "weights")) == 2
    pair.publisher.close()
    assert not os.listdir(tmp_path / "weights")


def test_group_that_fails_once_is_mended_and_stays_a_group(pair: Pair, network: Network, tmp_path: Path) -> None:
    for _ in range(3):
        network.failures = 1
        pair.restart_engine() if pair.version >= 0 else None
        updates = brought(pair)
        assert not any(by_files(update) or update.note for update in updates)
    assert not (tmp_path / "weights").exists()


def test_failures_with_other_engines_are_the_healing_of_a_death(pair: Pair, network: Network) -> None:
    for _ in range(3):
        network.failures = 1
        with pytest.raises(NeedsFull):
            pair.receiver.stage(pair.publish() if pair.version < 0 else pair.resend())
        pair.restart_engine()
    update = pair.resend()
    assert not by_files(update)
    pair.receiver.stage(update)


def test_group_without_a_folder_remains_a_group(network: Network) -> None:
    network.failures = 1000
    with open_pair(Route(transport="group", deadline_s=DEADLINE_S, silence_s=UNREACHED_S), seed=3) as pair:
        update = pair.publish()
        for _ in range(3):
            with pytest.raises(NeedsFull, match=r"did not arrive within 0\.5 s of silence: no route to host"):
                pair.receiver.stage(update)
            update = pair.resend()
        assert not by_files(update)


@pytest.fixture
def fallen(unreached: Pair) -> Pair:
    """A pair whose versions go through files."""
    brought(unreached)
    return unreached


def test_file_that_is_cut_off_or_damaged_or_gone_is_refused_and_repaired(fallen: Pair, tmp_path: Path) -> None:
    def cut(file: Path) -> None:
        os.truncate(file, file.stat().st_size - 1)

    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    harms: list[tuple[Callable[[Path], None], str]] = [
        (cut, "the file ends 1 bytes too early"),
        (flip, "send"),
        (Path.unlink, "let the engine reach the learner's sync.directory"),
    ]
    for harm, words in harms:
        fallen.learn()
        update = fallen.publish()
        harm(tmp_path / "weights" / f"{update.path.removeprefix('files|')}.rank0")
        with pytest.raises(NeedsFull) as refused:
            fallen.receiver.stage(update)
        assert words in f"{refused.value.problem} {refused.value.remedy}"
        fallen.receiver.stage(fallen.resend())
        fallen.receiver.commit(fallen.version)
        assert are_equal(fallen.engine, fallen.expected_weights())


def test_name_that_leads_out_of_the_folder_is_never_opened(fallen: Pair) -> None:
    fallen.learn()
    update = fallen.publish()
    for name in ("../secret", "/etc/passwd", ".hidden", "a\\b"):
        with pytest.raises(WeightsError, match="which is not one of"):
            fallen.receiver.stage(msgspec.structs.replace(update, path=f"files|{name}"))
        update = fallen.resend()  # whole: no difference is taken after a failure


def test_folder_that_cannot_be_written_is_named_with_the_failure_of_the_groups(unreached: Pair, tmp_path: Path) -> None:
    pair = unreached
    (tmp_path / "weights").write_text("a file where the folder should be")
    update = pair.publish()
    with pytest.raises(NeedsFull):
        pair.receiver.stage(update)
    with pytest.raises(NeedsFull):
        pair.receiver.stage(pair.resend())
    with pytest.raises(WeightsError, match=r"cannot be written to .* process groups failed before: ") as refused:
        pair.resend()
    assert "sync.directory" in refused.value.remedy
    (tmp_path / "weights").unlink()
    update = pair.resend()
    assert by_files(update)
    assert "failed 2 times in a row" in update.note, "it is told although the first file could not be written"
    pair.receiver.stage(update)


def test_rank_that_cannot_write_its_part_lets_no_version_be_announced(network: Network, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    tensors, shared = {"a": torch.ones(3), "b": torch.ones(4)}, [b""]
    boxes_by_rank = [whole_boxes({name: tensor}) for name, tensor in tensors.items()]

    def share(message: bytes | None) -> bytes:
        shared[0] = message or shared[0]
        return shared[0]

    with ThreadPoolExecutor(3) as threads:
        folder = str(tmp_path / "weights")
        route = Route(transport="group", deadline_s=DEADLINE_S, silence_s=UNREACHED_S, fallback=folder)
        receiver = make_receiver(route, {"a": torch.zeros(3), "b": torch.zeros(4)})
        ranks = [
            make_publisher(
                each, tensors, boxes_by_rank=boxes_by_rank, rank=LearnerRank(index=index, world=2, share=share)
            )
            for index, each in enumerate([route, msgspec.structs.replace(route, fallback=str(tmp_path / "taken"))])
        ]

        def sent(*, again: bool) -> WeightUpdate:
            calls = [rank.resend if again else rank.announce for rank in ranks]
            first, _ = [threads.submit(call, 0, 0, [receiver.address]) for call in calls]
            return first.result()

        for rank, tensor in zip(ranks, tensors.values(), strict=True):
            rank.fill(0, [tensor])
        network.failures = 1000
        for again in (False, True):
            with pytest.raises(NeedsFull):
                receiver.stage(sent(again=again))
        with pytest.raises(WeightsError, match=r"cannot be written to .*taken/v00000000.*\.rank1"):
            sent(again=True)
        for rank in ranks:
            rank.close()
        receiver.close()


def test_engine_that_no_network_connects_to_the_learner_says_so_in_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(host: str, port: int) -> str:
        raise OSError(101, "Network is unreachable")

    update = pair.publish()
    monkeypatch.setattr(group, "_own_address", unreachable)
    with pytest.raises(NeedsFull, match="Network is unreachable"):
        pair.receiver.stage(update)


def test_files_that_a_killed_run_left_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "v00000007-01234567.rank1"
    left.write_bytes(b"x")
    (tmp_path / "mine.txt").write_text("stays")
    with open_pair(Route(transport="group", deadline_s=DEADLINE_S, fallback=str(tmp_path)), seed=3) as pair:
        assert os.listdir(tmp_path) == ["mine.txt"]
        brought(pair)


PLAN = SyncPlan(shapes={"a": (64, 32), "b": (7,), "c": (600, 700), "d": (2, 2)}, dtype="float32")


@pytest.mark.parametrize("codec", [pytest.param("full", marks=pytest.mark.slow), "delta"])
def test_every_rank_writes_its_part_and_every_engine_reads_all(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(PLAN))
    with ExitStack() as stack:
        sides = ["rank-0", "rank-1", "engine-0", "engine-1"]
        started = [stack.enter_context(open_worker(side, path, 1, module="tests.sync.deaf_member")) for side in sides]
        members = GroupMembers(ranks=started[:2], engines=started[2:])
        members.open(Route(transport="group", codec=codec, deadline_s=2.0, fallback=str(tmp_path / "weights")))
        for version in range(4):
            members.copy_weights(version)
            errors = members.send(version)
            if version == 0:
                assert all(errors + members.send(version, again=True))
                errors = members.send(version, again=True)
            assert errors == ["", ""]  # hashes of every piece hold
            members.commit(version)
        names = sorted(os.listdir(tmp_path / "weights"))
        assert [name[name.index(".") :] for name in names] == [".rank0", ".rank1"] * 2


PLANTED = '''
    """Process groups in which engines name an address that nobody has, as often as the file ``failures`` has bytes."""
    import os, sys
    from importlib.abc import MetaPathFinder
    from importlib.machinery import PathFinder

    FILE = os.path.join(os.path.dirname(__file__), "failures")

    class Planted(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "headrace.sync.groups":
                return None
            spec = PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                whole = module.gloo_group

                def cut(store, rank_and_size, deadline_s, host):
                    if rank_and_size[0] and os.path.getsize(FILE):
                        os.truncate(FILE, os.path.getsize(FILE) - 1)
                        host = "192.0.2.1"
                    return whole(store, rank_and_size, deadline_s, host)

                module.gloo_group = cut

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Planted())
'''


@pytest.mark.parametrize(("failures", "falls"), [(1000, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_run_goes_on_through_files_where_engines_are_never_reached_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, falls: bool
) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(textwrap.dedent(PLANTED))
    (planted / "failures").write_bytes(b"x" * failures)
    monkeypatch.setenv("PYTHONPATH", str(planted))
    # long enough for a group to be joined, where one is to be
    sections: dict[str, Any] = {"sync": {"transport": "group", "deadline_s": 5.0 if falls else 8.0}}
    run_file = make_run(tmp_path / "run", tiny_model(tmp_path / "model"), **sections)
    done = headrace("train", run_file, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (planted / "failures").stat().st_size == failures - (2 if falls else 1), "the fault was not met"
    summary = json.loads((tmp_path / "run" / "run" / "summary.json").read_text())
    assert summary["versions"] == [0, 3]
    said = [words for words in summary["warnings"] if "weights go through files from version 0 on" in words]
    assert len(said) == falls
    assert ("weights go through files" in done.stdout + done.stderr) == falls
    assert not list((tmp_path / "run" / "run").glob("weights/*")), "files are left"
