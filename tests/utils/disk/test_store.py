"""Tensors come back from the disk as they were, or an error says why not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.utils.disk import ALIGNMENT, DiskStore, Regions, aligned_empty
from tests.utils.disk.limits import small_files

SIZES = (1, ALIGNMENT - 1, ALIGNMENT, 3 * ALIGNMENT + 5, 5 * ALIGNMENT)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(tmp_path, threads=3, request_bytes=2 * ALIGNMENT)
    yield made
    made.close()


def _bytes(numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (numel,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("offset", [0, 1, 512])
def test_any_size_and_address_comes_back(store: DiskStore, offset: int) -> None:
    sources = [aligned_empty(n + offset)[offset:].copy_(_bytes(n, n)) for n in SIZES]
    for pending in [store.write(str(i), t) for i, t in enumerate(sources)]:
        pending.wait()
    guarded = [aligned_empty(n + offset + 9).fill_(77) for n in SIZES]
    targets = [g[offset : offset + n] for g, n in zip(guarded, SIZES, strict=True)]
    for pending in [store.read(str(i), into=t) for i, t in enumerate(targets)]:
        pending.wait()
    for source, target, guard in zip(sources, targets, guarded, strict=True):
        assert torch.equal(source, target)
        assert (guard[offset + len(source) :] == 77).all()  # what lies behind is not touched
    assert store.bytes_written == store.bytes_read == sum(SIZES)


def test_dtypes_shapes_and_nothing_at_all(store: DiskStore) -> None:
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.int16, torch.float64)):
        source = torch.randn(7, 300).to(dtype)
        store.write(f"t{i}", source).wait()
        target = torch.empty_like(source)
        store.read(f"t{i}", target).wait()
        assert torch.equal(source, target)
    store.write("empty", torch.empty(0)).wait()
    store.read("empty", torch.empty(0)).wait()


def test_aligned_memory() -> None:
    for numel in (0, 1, 1000, 100_000):
        tensor = aligned_empty(numel, torch.float64)
        assert tensor.shape == (numel,)
        assert numel == 0 or tensor.data_ptr() % ALIGNMENT == 0


@pytest.mark.gpu
def test_pinned_memory(store: DiskStore) -> None:
    tensor = aligned_empty(100_000, torch.float32, pin_memory=True).normal_()
    assert tensor.is_pinned()
    assert tensor.data_ptr() % ALIGNMENT == 0
    store.write("t", tensor).wait()
    target = torch.empty(100_000)
    store.read("t", target).wait()
    assert torch.equal(tensor, target)


def test_a_read_waits_for_the_write_before_it_and_a_write_for_the_reads(store: DiskStore) -> None:
    tensor, target = aligned_empty(64 * ALIGNMENT), aligned_empty(64 * ALIGNMENT)
    for value in range(20):
        store.write("t", tensor.fill_(value))
        pending = store.read("t", target)  # waits for the write
        store.write("t", torch.full_like(tensor, 255))
        pending.wait()
        assert (target == value).all()


def test_room_is_counted_and_used_again(store: DiskStore, tmp_path: Path) -> None:
    store.write("a", _bytes(5 * ALIGNMENT)).wait()
    store.write("b", _bytes(ALIGNMENT + 1)).wait()
    assert store.used == 7 * ALIGNMENT
    store.free("a")
    assert "a" not in store
    store.write("c", _bytes(4 * ALIGNMENT)).wait()
    store.write("b", _bytes(ALIGNMENT)).wait()  # another size moves it
    assert store.used == 5 * ALIGNMENT
    assert os.fstat(store._file.fd).st_size == 7 * ALIGNMENT
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_regions_join_their_neighbours() -> None:
    regions = Regions()
    regions.grow(10)
    assert [regions.take(n) for n in (2, 3, 5)] == [0, 2, 5]
    assert regions.missing(1) == 1
    regions.give(0, 2)
    regions.give(5, 5)
    assert regions.missing(4) == 0
    assert regions.missing(6) == 1  # what is free at the end counts
    regions.give(2, 3)
    assert regions.missing(10) == 0
    assert regions.take(10) == 0


def test_a_capacity(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity=2 * ALIGNMENT)
    store.write("a", _bytes(ALIGNMENT)).wait()
    with pytest.raises(
        RuntimeError, match=rf"{tmp_path} may hold 8192 bytes: 4096 are used and 8192 more are needed. Raise"
    ):
        store.write("b", _bytes(ALIGNMENT + 1))
    store.write("b", _bytes(ALIGNMENT)).wait()


def test_booked_room_is_counted_once(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, capacity=3 * ALIGNMENT)
    assert store.book("a", ALIGNMENT + 1)
    assert store.used == store.count.peak == 2 * ALIGNMENT
    assert not store.book("b", ALIGNMENT + 1)
    store.write("a", _bytes(ALIGNMENT + 1)).wait()  # takes what was booked
    assert store.used == 2 * ALIGNMENT
    assert store.book("a", 1)  # another size, before it is written
    assert store.used == ALIGNMENT
    assert store.book("b", 2 * ALIGNMENT)
    for name in ("a", "b", "unknown"):
        store.free(name)
    assert store.used == 0
    assert store.count.peak == 3 * ALIGNMENT


def test_short_transfers_go_on(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may move less than it was asked for.

    In direct I/O also a part of a block, which must be repeated.
    """
    lengths: list[int] = []

    def short(call: Callable[..., int]) -> Callable[..., int]:
        def wrapper(fd: int, buffers: list[memoryview], offset: int) -> int:
            lengths.append(len(buffers[0]))
            moved = call(fd, [buffers[0][:ALIGNMENT]], offset)
            return moved + 100 if len(buffers[0]) > ALIGNMENT else moved

        return wrapper

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    source, target = _bytes(6 * ALIGNMENT), torch.empty(6 * ALIGNMENT, dtype=torch.uint8)
    store.write("t", source).wait()
    store.read("t", target).wait()
    assert torch.equal(source, target)
    assert sorted(lengths) == [ALIGNMENT] * 6 + [2 * ALIGNMENT] * 6


def test_errors_surface_in_wait_and_the_tensor_is_still_there(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 2 * ALIGNMENT:
            raise OSError(errno.EIO, "broken")
        return len(buffers[0])

    tensor = _bytes(4 * ALIGNMENT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        pending = store.write("t", tensor)
        for _ in range(2):  # every time it is asked
            with pytest.raises(
                OSError,
                match=rf"cannot write 8192 bytes at offset 8192 of the file \(of 16384 bytes\) .* in"
                rf" {tmp_path}: Input/output error",
            ) as caught:
                pending.wait()
            assert caught.value.errno == errno.EIO
        with pytest.raises(OSError, match="cannot write 8192 bytes at offset 8192"):
            store.read("t", torch.empty_like(tensor))  # never garbage
    store.write("t", tensor).wait()  # the disk is well again
    target = torch.empty_like(tensor)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(OSError, match=r"cannot read 8192 bytes at offset 0 .*Input/output error"):
            store.read("t", target).wait()
    store.read("t", target).wait()
    assert torch.equal(tensor, target)


@small_files(1 << 20)
def test_a_full_disk_is_known_before_anything_is_written(store: DiskStore, tmp_path: Path) -> None:
    kept = _bytes(ALIGNMENT)
    store.write("kept", kept).wait()
    with pytest.raises(
        OSError,
        match=rf"no room to offload to {tmp_path} \(File too large\): 2097152 bytes more are needed beside"
        r" the 4096 of this file,"
        r" \d+ are available\. Free some, or offload less or elsewhere",
    ):
        store.write("t", _bytes(2 << 20))
    assert "t" not in store
    assert store.used == ALIGNMENT
    target = torch.empty_like(kept)
    store.read("kept", target).wait()
    assert torch.equal(kept, target)
    store.write("other", _bytes(1 << 19)).wait()


def test_a_really_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"may not mount a small file system here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.warns(
            UserWarning, match=r"is in memory itself \(tmpfs\): offloading to it saves nothing"
        ):
            store = DiskStore(tmp_path)
        store.write("t", _bytes(1 << 19)).wait()
        with pytest.raises(
            OSError, match=r"No space left on device\): 1048576 bytes more are needed .* 524288 are available"
        ):
            store.reserve(1 << 20)
        target = torch.empty(1 << 19, dtype=torch.uint8)
        store.read("t", target).wait()
        assert torch.equal(target, _bytes(1 << 19))
        store.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _refuse(name: str, original: Callable[..., Any], code: int) -> Callable[..., Any]:
    def refusing(*args: Any) -> Any:
        if name == "fcntl" and args[1:] and isinstance(args[-1], int) and args[-1] & os.O_DIRECT:
            raise OSError(code, "refused")
        if name == "open" and args[1] & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, "refused")
        return original(*args)

    return refusing


def test_a_file_system_without_direct_io_and_nameless_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(fcntl, "fcntl", _refuse("fcntl", fcntl.fcntl, errno.EINVAL))
    monkeypatch.setattr(os, "open", _refuse("open", os.open, errno.EOPNOTSUPP))
    with pytest.warns(
        UserWarning, match=r"the file system of .* has no direct I/O; .* through the page cache"
    ):
        store = DiskStore(tmp_path)
    assert not store.is_direct
    source = _bytes(10_000)
    store.write("t", source).wait()
    target = torch.empty_like(source)
    store.read("t", target).wait()
    assert torch.equal(source, target)
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_without_preallocation(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "refused")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store.write("t", _bytes(10_000)).wait()
    with pytest.raises(OSError, match=r"No space left on device\): \d+ bytes more are needed"):
        store.reserve(1 << 60)


def test_wrong_arguments(store: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"/proc/not/here is not a directory and cannot be made \(No such file.*there; create it",
    ):
        DiskStore("/proc/not/here")
    with pytest.raises(
        OSError, match=r"no file can be created in /proc/self \(.*\); name a directory that you may"
    ):
        DiskStore("/proc/self")
    with pytest.raises(
        ValueError, match="needs request_bytes that are a positive multiple of 4096; got 1000"
    ):
        DiskStore(tmp_path, request_bytes=1000)
    with pytest.raises(
        ValueError, match=r"contiguous tensors on cpu to write; 't' is on cpu with strides \(1, 3\)"
    ):
        store.write("t", torch.ones(2, 3).t())
    with pytest.raises(ValueError, match="contiguous tensors on cpu to read; 't' is on meta"):
        store.read("t", torch.ones(2, device="meta"))
    with pytest.raises(KeyError, match="nothing was written as 't' to "):
        store.read("t", torch.ones(2))
    store.write("t", torch.ones(2)).wait()
    with pytest.raises(ValueError, match="'t' has 8 bytes on the disk, the tensor to read it into 12"):
        store.read("t", torch.ones(3))
    store.close()
    with pytest.raises(RuntimeError, match="cannot read 't': this DiskStore is closed"):
        store.read("t", torch.ones(2))


def test_a_forgotten_store_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But nobody waits for that: the garbage collector may have interrupted
    someone whom the threads of the store wait for.
    """
    files, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    store = DiskStore(tmp_path)
    begun, gate, write = threading.Event(), threading.Event(), os.pwritev

    def slow(*args: Any) -> int:
        begun.set()
        assert gate.wait(30)
        return write(*args)

    monkeypatch.setattr(os, "pwritev", slow)
    store.write("t", _bytes(1 << 20))
    assert begun.wait(30)
    forgotten = weakref.ref(store)
    file = weakref.ref(store._file)
    del store
    assert forgotten() is None  # while a write is under way
    assert file() is not None
    gate.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)
    assert file() is None
    assert len(os.listdir("/proc/self/fd")) == files
    assert set(threading.enumerate()) == threads


ENDINGS = {
    "return": ("", 0),
    "exception": ("raise RuntimeError('over')", 1),
    "kill": ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_behind(tmp_path: Path, ending: str) -> None:
    last, code = ENDINGS[ending]
    script = f"""
import os, sys, torch
from colossalai.utils.disk import DiskStore
store = DiskStore(sys.argv[1])
store.write("a", torch.ones(1 << 18)).wait()
store.write("b", torch.ones(1 << 18))
{last}
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == code, done.stderr.decode()
    assert list(tmp_path.iterdir()) == []
