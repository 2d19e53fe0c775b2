from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.models.kernels import build
from headrace.models.kernels.build import Unavailable, open_library
from headrace.models.kernels.ops import Kernels, kernels, open_kernels
from headrace.models.kernels.panels import PackedProduct


@pytest.fixture(scope="module")
def ops() -> Kernels:
    loaded = kernels()
    if isinstance(loaded, Unavailable):
        pytest.skip(loaded.reason)
    return loaded


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def far(given_: Tensor, wanted: Tensor) -> float:
    return float((given_ - wanted).abs().max() / wanted.abs().max())


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 90), k=st.integers(1, 200), bias=st.booleans())
def test_products_are_those_of_double_precision(m: int, n: int, k: int, bias: bool) -> None:
    loaded = kernels()
    if isinstance(loaded, Unavailable):
        pytest.skip(loaded.reason)
    x, w, b = drawn(m, k), drawn(n, k, seed=1), drawn(n, seed=2)
    wanted = F.linear(x.double(), w.double(), b.double() if bias else None)
    magnitude = F.linear(x.double().abs(), w.double().abs(), b.double().abs())
    assert float(((loaded.linear(x, PackedProduct(w, b if bias else None)) - wanted).abs() / magnitude).max()) < 1e-6


@pytest.mark.parametrize("k", [256, 279, 304])
def test_products_of_many_tokens_and_long_rows_are_right_and_those_of_few(ops: Kernels, k: int) -> None:
    x, w = drawn(200, k), drawn(77, k, seed=1)  # weights are fetched at another pace there
    whole = ops.linear(x, PackedProduct(w))
    magnitude = F.linear(x.double().abs(), w.double().abs())
    assert float(((whole - F.linear(x.double(), w.double())).abs() / magnitude).max()) < 1e-6
    for size in (1, 2, 8, 40, 64, 97, 199):
        assert torch.equal(ops.linear(x[:size], PackedProduct(w)), whole[:size]), size


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_tokens_product_has_the_same_bits_in_every_batch(ops: Kernels, threads: int) -> None:
    x, w, b = drawn(200, 131), drawn(77, 131, seed=1), drawn(77, seed=2)
    whole = ops.linear(x, PackedProduct(w, b))
    torch.set_num_threads(threads)
    for size in range(1, 201):
        at = (size * 37) % (201 - size)
        assert torch.equal(ops.linear(x[at : at + size], PackedProduct(w, b)), whole[at : at + size]), size


def test_products_side_by_side_have_the_bits_of_each_alone(ops: Kernels) -> None:
    x, several = drawn(5, 64), [PackedProduct(drawn(n, 64, seed=n)) for n in (32, 17, 80)]
    joined = ops.linears(x, several)
    assert torch.equal(joined, torch.cat([ops.linear(x, each) for each in several], -1))


def packed(ops: Kernels, weight: Tensor) -> Tensor:
    panels = torch.full((ops.panel_numbers(weight) + 1,), torch.nan)
    ops.pack([(weight, panels[:-1])], 1)
    assert panels[-1].isnan()
    return panels[:-1]


@settings(max_examples=100, deadline=None)
@given(m=st.integers(0, 120), n=st.integers(1, 130), k=st.integers(1, 90), bias=st.booleans())
def test_weights_that_are_packed_beforehand_give_the_same_bits(m: int, n: int, k: int, bias: bool) -> None:
    loaded = kernels()
    if isinstance(loaded, Unavailable):
        pytest.skip(loaded.reason)
    x, w, b = drawn(m, k), drawn(n, k, seed=1), drawn(n, seed=2) if bias else None
    ahead, plain = PackedProduct(w, b, packed(loaded, w)), PackedProduct(w, b)
    wanted = loaded.linear(x, plain)
    assert torch.equal(loaded.linear(x, ahead), wanted)
    assert torch.equal(loaded.linears(x, [ahead, plain, ahead]), torch.cat([wanted] * 3, -1))
    up, down = PackedProduct(drawn(n, k, seed=3)), PackedProduct(drawn(k, n, seed=4))
    both = (down.weight, None, packed(loaded, down.weight))
    assert torch.equal(loaded.gated(x, ahead, up, PackedProduct(*both)), loaded.gated(x, plain, up, down))


def test_panels_hold_rows_side_by_side_and_zeros_beyond_the_last(ops: Kernels) -> None:
    w = drawn(77, 41)
    panels = packed(ops, w).view(-1, 41, ops.panel_numbers(w[:1]) // 41)
    rows = panels.transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows[:77], w)
    assert not rows[77:].any()


@pytest.mark.parametrize("size", [32, 100])
def test_norm_mlp_and_log_softmax_are_those_of_double_precision(ops: Kernels, size: int) -> None:
    x, w = drawn(30, size), drawn(size, seed=1)
    double = x.double()
    normed = double * torch.rsqrt(double.square().mean(-1, keepdim=True) + 1e-6)
    assert far(ops.rms_norm(x, w, 1e-6, 1.0), normed * (w.double() + 1)) < 1e-6
    gate, up, down = drawn(90, size, seed=2) / 8, drawn(90, size, seed=3) / 8, drawn(size, 90, seed=4) / 8
    inner = F.silu(F.linear(double, gate.double())) * F.linear(double, up.double())
    assert (
        far(ops.gated(x, PackedProduct(gate), PackedProduct(up), PackedProduct(down)), F.linear(inner, down.double()))
        < 1e-6
    )
    assert far(ops.log_softmax(x * 10), (double * 10).log_softmax(-1)) < 1e-6


def test_norm_mlp_and_log_softmax_have_the_same_bits_in_every_batch(ops: Kernels) -> None:
    x, w = drawn(70, 100), drawn(100, seed=1)
    gate, up, down = (PackedProduct(drawn(*shape, seed=2)) for shape in ((90, 100), (90, 100), (100, 90)))
    for f in (lambda t: ops.rms_norm(t, w, 1e-6), lambda t: ops.gated(t, gate, up, down), ops.log_softmax):
        whole = f(x)
        for size in (1, 2, 3, 5, 8, 33):
            assert torch.equal(f(x[11 : 11 + size]), whole[11 : 11 + size])


def test_a_number_that_is_not_finite_stays_visible(ops: Kernels) -> None:
    x, w = drawn(4, 64), drawn(64, 64, seed=1)
    x[2, 5] = torch.nan
    for out in (
        ops.linear(x, PackedProduct(w)),
        ops.gated(x, PackedProduct(w), PackedProduct(w), PackedProduct(w)),
        ops.log_softmax(x),
    ):
        assert out.isnan().all(-1).tolist() == [False, False, True, False]


def test_without_a_compiler_there_is_a_reason_and_no_error(tmp_path: Path) -> None:
    answer = open_library(tmp_path, ["no-such-compiler"])
    assert isinstance(answer, Unavailable)
    assert "no-such-compiler" in answer.reason


def test_a_compiler_that_fails_is_a_reason_and_no_error(tmp_path: Path) -> None:
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho out of registers >&2\nexit 3\n")
    failing.chmod(0o700)
    answer = open_library(tmp_path / "cache", [str(failing)])
    assert isinstance(answer, Unavailable)
    assert "out of registers" in answer.reason


def test_sources_that_are_replaced_under_a_running_program_are_not_the_ones_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_HERE", tmp_path / "elsewhere")
    telling = tmp_path / "cc"
    telling.write_text("#!/bin/sh\nls *.cpp >&2\nexit 3\n")
    telling.chmod(0o700)
    answer = open_library(tmp_path / "cache", [str(telling)])
    assert isinstance(answer, Unavailable)
    assert "kernels.cpp" in answer.reason
    assert not list((tmp_path / "cache").iterdir())


def test_programs_that_build_at_once_all_get_a_whole_library(ops: Kernels, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(open_kernels, [tmp_path] * 2))
    assert [type(one) for one in loaded] == [Kernels] * 2
    assert [file.suffix for file in tmp_path.iterdir()] == [".so"]


def test_of_programs_that_start_at_once_one_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    ran, gate = tmp_path / "ran", tmp_path / "gate"
    os.mkfifo(gate)
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\necho ran >> {ran}\ncat {gate}\nsleep 0.2\nfor name; do :; done\necho no > "$name"\n'
    )
    compiler.chmod(0o700)
    program = (
        "import pathlib, sys; from headrace.models.kernels.build import open_library; print('begun', flush=True); "
        "open_library(pathlib.Path(sys.argv[1]), [sys.argv[2]])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache"), str(compiler)]
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for one in programs:
        assert one.stdout is not None
        assert one.stdout.readline() == "begun\n"
    gate.write_text("go")  # returns when a compiler reads
    for one in programs:
        one.communicate(timeout=30)
        assert one.returncode == 0
    assert ran.read_text() == "ran\n"


def test_a_stopped_program_that_holds_the_lock_is_named_and_keeps_no_other_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor name; do :; done\necho no > "$name"\n')
    compiler.chmod(0o700)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    program = (
        "import fcntl, os, signal, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); "
        "print('held', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    command = [sys.executable, "-c", program, str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
            open_library(cache, [str(compiler)], wait_s=0.1)
        finally:
            holder.kill()
    assert [file.suffix for file in cache.iterdir()] == [".so"], "it was compiled all the same"
    told = capsys.readouterr().err
    assert f"process {holder.pid} (stopped) has held the lock of {cache} for over 0.1 s" in told


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own_and_gets_the_same_bits(ops: Kernels) -> None:
    torch.set_num_threads(2)
    x, w = drawn(64, 256), drawn(512, 256, seed=1)
    wanted = ops.linear(x, PackedProduct(w))
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(lambda: [ops.linear(x, PackedProduct(w)) for _ in range(300)])
        child = os.fork()
        if not child:
            same = all(torch.equal(ops.linear(x, PackedProduct(w)), wanted) for _ in range(20))
            os._exit(0 if same and len(os.listdir("/proc/self/task")) > 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(busy.result()) == 300


def test_whoever_packs_alone_leaves_the_helpers_to_others(ops: Kernels) -> None:
    weight, x, w = torch.zeros(2048, 4096), drawn(64, 256), drawn(512, 256, seed=1)
    panels, done = torch.zeros(ops.panel_numbers(weight)), threading.Event()
    begun = threading.Event()

    def pack() -> None:
        while not done.is_set():
            ops.pack([(weight, panels)] * 8, 1)
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        packing = pool.submit(pack)
        assert begun.wait(60)
        torch.set_num_threads(len(os.listdir("/proc/self/task")) + 2)  # more than have ever been hired
        before = len(os.listdir("/proc/self/task"))
        ops.linear(x, PackedProduct(w))
        hired = len(os.listdir("/proc/self/task")) - before
        done.set()
        packing.result()
    assert hired > 0


@pytest.mark.slow
def test_a_corrupt_library_is_built_again(ops: Kernels, tmp_path: Path) -> None:
    assert isinstance(open_kernels(tmp_path), Kernels)
    (file,) = tmp_path.glob("*.so")
    whole = file.read_bytes()
    broken = tmp_path / "broken"
    broken.write_bytes(whole[:1000])
    broken.replace(file)
    assert isinstance(open_kernels(tmp_path), Kernels)
    assert len(file.read_bytes()) == len(whole)


def test_nothing_is_loaded_from_a_directory_that_others_can_write(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chmod(shared, 0o777)
    answer = open_library(shared)
    assert isinstance(answer, Unavailable)
    assert "other users" in answer.reason


def test_two_threads_of_a_program_may_call_at_once_and_get_the_same_bits(ops: Kernels) -> None:
    torch.set_num_threads(2)
    x, w = drawn(64, 128), drawn(256, 128, seed=1)
    wanted = ops.linear(x, PackedProduct(w))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [ops.linear(x, PackedProduct(w)) for _ in range(50)], range(4)))
    assert all(torch.equal(y, wanted) for ys in found for y in ys)


@pytest.mark.parametrize("target", [("-mavx2", "-mfma"), ("-O2",)], ids=["avx2", "baseline"])
def test_kernels_for_lesser_processors_are_right_and_invariant(tmp_path: Path, target: tuple[str, ...]) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("options for another processor")
    lesser = open_kernels(tmp_path, target)
    if isinstance(lesser, Unavailable):
        pytest.skip(lesser.reason)
    test_products_of_many_tokens_and_long_rows_are_right_and_those_of_few(lesser, 279)
    test_a_tokens_product_has_the_same_bits_in_every_batch(lesser, 2)
    test_norm_mlp_and_log_softmax_are_those_of_double_precision(lesser, 100)
    test_norm_mlp_and_log_softmax_have_the_same_bits_in_every_batch(lesser)
    test_a_number_that_is_not_finite_stays_visible(lesser)
    test_panels_hold_rows_side_by_side_and_zeros_beyond_the_last(lesser)
