"""States on a disk change nothing but where the states are."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.nn import optimizer as optim
from colossalai.nn.optimizer import nvme_pipeline
from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.testing import check_state_dict_equal, parametrize_sample
from tests.utils.disk.limits import small_files

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((9000,), (70, 90), (5, 3), (1,), (3, 8, 10, 10), (41, 101), (2500,))


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that these small parameters are cut, and some share a slot.

    Many threads would only wait for each other.
    """
    monkeypatch.setattr(nvme_pipeline, "LEAST", 1 << 14)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    values[4] = values[4].contiguous(memory_format=torch.channels_last)
    values[5] = values[5].t()
    return [nn.Parameter(value) for value in values]


def _grads(parameters: list[nn.Parameter], step: int) -> None:
    """The third parameter has none in odd steps; those of the sixth lie in memory in another order."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(parameters):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if (number == 2 and step % 2) or not p.requires_grad else grad


def _make(
    parameters: list[nn.Parameter], fraction: float, directory: Any = None, kind: str = "HybridAdam"
) -> NVMeOptimizer:
    groups = [{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:], "weight_decay": 0.1}]
    options = {"nvme_offload_fraction": fraction, "nvme_offload_dir": directory}
    made: NVMeOptimizer = getattr(optim, kind)(groups, lr=0.01, **options)
    return made


def _train(parameters: list[nn.Parameter], optimizer: Any, steps: range, div_scale: float = -1) -> None:
    for step in steps:
        optimizer.param_groups[1]["lr"] = 0.01 / (step + 1)
        _grads(parameters, step)
        optimizer.step(div_scale=div_scale)


def _assert_same(a: list[nn.Parameter], b: list[nn.Parameter]) -> None:
    for number, (p, q) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(p, q), f"parameter {number}"


CASES = [(k, d, f) for k in ("CPUAdam", "HybridAdam") for d in DTYPES for f in (0.3, 0.5, 1.0)]


@parametrize_sample("kind, dtype, fraction", CASES, n=12)
def test_training_is_bit_equal(kind: str, dtype: torch.dtype, fraction: float, tmp_path: Path) -> None:
    serial, parameters = _parameters(dtype), _parameters(dtype)
    expected, optimizer = _make(serial, 0.0, kind=kind), _make(parameters, fraction, tmp_path, kind)
    for own in (serial, parameters):
        own[6].requires_grad_(False)
    _train(serial, expected, range(4), div_scale=2.0)
    _train(parameters, optimizer, range(4), div_scale=2.0)
    _assert_same(serial, parameters)
    check_state_dict_equal(expected.state_dict(), optimizer.state_dict())
    for p, q in zip(serial, parameters, strict=True):
        assert torch.equal(expected.master(p), optimizer.master(q))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 1.0])
def test_the_fraction_is_met(fraction: float, tmp_path: Path) -> None:
    parameters = _parameters(torch.float32)
    optimizer = _make(parameters, fraction, tmp_path)
    _train(parameters, optimizer, range(2))
    found = optimizer._offload
    assert found is not None
    everything = 8 * sum(p.numel() for p in parameters)
    assert everything <= found.total_bytes < everything * 1.01
    largest = max(slot.nbytes for slot in found.slots_of(found.slots))
    assert abs(found.disk_bytes / found.total_bytes - fraction) <= largest / found.total_bytes
    in_memory = sum(s.nbytes for s in found.slots_of(found.slots) if s.memory is not None)
    assert in_memory == found.total_bytes - found.disk_bytes
    assert all(set(state) == {"step"} for state in optimizer.state.values())


def test_parameters_without_gradients_cause_no_transfers(tmp_path: Path) -> None:
    used, unused = nn.Parameter(torch.ones(4096)), nn.Parameter(torch.ones(4096))
    optimizer = optim.CPUAdam([used, unused], nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    used.grad = torch.ones(4096)
    optimizer.step()
    store = optimizer._offload.pipeline.shelf.store
    assert (store.bytes_read, store.bytes_written) == (0, 32_768)
    assert unused not in optimizer.state
    unused.grad, used.grad = torch.ones(4096), None
    optimizer.step()
    assert (store.bytes_read, store.bytes_written) == (0, 65_536)
    unused.grad = None
    optimizer.step()
    assert (store.bytes_read, store.bytes_written) == (0, 65_536)
    assert optimizer.state[used]["step"] == optimizer.state[unused]["step"] == 1


def test_slots() -> None:
    parameters = [torch.empty(n) for n in (2500, 10, 1014, 5000, 3)]
    found = [
        [(e.parameter.numel(), e.start, e.stop) for e in part] for part in nvme_pipeline.cut(parameters, 2048)
    ]
    assert found == [
        [(2500, 0, 2048)],
        [(2500, 2048, 2500), (10, 0, 10), (1014, 0, 1014)],
        [(5000, 0, 2048)],
        [(5000, 2048, 4096)],
        [(5000, 4096, 5000), (3, 0, 3)],
    ]
    slot = nvme_pipeline.StateSlot(
        "s", [nvme_pipeline.Extent(torch.empty(3), 0, 3)], [("a", torch.int16), ("b", torch.float64)]
    )
    assert slot.nbytes == 128
    [(_, states)] = slot.states(torch.zeros(200, dtype=torch.uint8))
    assert {name: (state.dtype, len(state)) for name, state in states.items()} == {
        "a": (torch.int16, 3),
        "b": (torch.float64, 3),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_a_resumed_training_goes_on_exactly(
    dtype: torch.dtype, before: float, after: float, tmp_path: Path
) -> None:
    serial, first = _parameters(dtype), _parameters(dtype)
    _train(serial, _make(serial, 0.0), range(4))
    optimizer = _make(first, before, tmp_path)
    _train(first, optimizer, range(2))
    torch.save([optimizer.state_dict(), first], tmp_path / "saved")
    state, weights = torch.load(tmp_path / "saved", weights_only=False)
    second = _parameters(dtype)
    other = _make(second, after, tmp_path)
    _train(second, other, range(7, 8))  # something to be replaced
    other.load_state_dict(state)
    with torch.no_grad():
        for p, value in zip(second, weights, strict=True):
            p.copy_(value)
    check_state_dict_equal(optimizer.state_dict()["state"], other.state_dict()["state"])
    _train(second, other, range(2, 4))
    _assert_same(serial, second)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_as_good(dtype: torch.dtype, duplicate: Callable[[Any], Any], tmp_path: Path) -> None:
    serial, parameters = _parameters(dtype), _parameters(dtype)
    _train(serial, _make(serial, 0.0), range(4))
    optimizer = _make(parameters, 1.0, tmp_path)
    _train(parameters, optimizer, range(2))
    twins, twin = duplicate((parameters, optimizer))
    _train(twins, twin, range(2, 4))
    _assert_same(serial, twins)
    assert twin._offload.disk_bytes == optimizer._offload.disk_bytes > 0
    _train(parameters, optimizer, range(2, 4))
    _assert_same(serial, parameters)


def test_states_of_torch(tmp_path: Path) -> None:
    source = _parameters(torch.float32)
    theirs = torch.optim.AdamW(source, lr=0.01)
    _grads(source, 0)
    theirs.step()
    results = []
    for fraction in (0.0, 1.0):
        parameters = [nn.Parameter(p.detach().clone()) for p in source]
        ours = optim.CPUAdam(parameters, nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path)
        ours.load_state_dict(theirs.state_dict())
        assert ours.param_groups[0]["lr"] == 0.01
        if fraction:
            assert all(set(state) == {"step"} for state in ours.state.values())  # on the disk at once
        _grads(parameters, 1)
        ours.step()
        results.append(parameters)
    _assert_same(*results)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_on_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    serial, parameters = _parameters(dtype), _parameters(dtype)
    _train(serial, _make(serial, 0.0), range(3))
    optimizer = _make(parameters, 0.7, tmp_path)
    for step in range(3):
        optimizer.param_groups[1]["lr"] = 0.01 / (step + 1)
        _grads(parameters, step)
        cuts = (0, 1, 3, 7) if step % 2 else (0, 2, 6, 7)  # not always the same parts
        for start, stop in reversed(list(pairwise(cuts))):
            optimizer.step_on(parameters[start:stop])
    _assert_same(serial, parameters)


def test_a_group_that_comes_later(tmp_path: Path) -> None:
    results = []
    for fraction in (0.0, 1.0):
        parameters = _parameters(torch.bfloat16)
        optimizer = optim.HybridAdam(
            parameters[:3], lr=0.1, nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path
        )
        _grads(parameters, 0)
        optimizer.step()
        optimizer.add_param_group({"params": parameters[3:], "lr": 0.01})
        for step in range(3):
            _grads(parameters, step)
            optimizer.step()
        results.append(parameters)
    _assert_same(*results)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_others_change(dtype: torch.dtype, fraction: float, tmp_path: Path) -> None:
    """A master starts again where its weight was changed, and only there.

    Also if the weight misses the next step.
    """
    parameter = nn.Parameter(torch.zeros(3000, dtype=dtype))
    optimizer = optim.HybridAdam(
        [parameter], lr=1e-4, nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path
    )
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = optimizer.master(parameter).clone()
    with torch.no_grad():
        parameter[2500:] = 1.0
    parameter.grad = None
    optimizer.step()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    after = optimizer.master(parameter)
    assert (parameter[2500:] == 1.0).all()
    assert (after[2500:] == 1.0).all()
    if dtype == torch.float16:
        assert torch.equal(after[:2500], before[:2500])


class _Broken:
    """``os.pwritev`` or ``os.preadv`` that fails beyond an offset."""

    def __init__(self, call: Callable[..., int], beyond: int) -> None:
        self.call, self.beyond = call, beyond

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= self.beyond:
            raise OSError(errno.EIO, "broken")
        return self.call(fd, buffers, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("failing", [0, 1])
def test_failed_writes_lose_nothing(
    dtype: torch.dtype, failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serial, parameters = _parameters(dtype), _parameters(dtype)
    expected, optimizer = _make(serial, 0.0), _make(parameters, 1.0, tmp_path)
    for step in range(4):
        _train(serial, expected, range(step, step + 1))
        if step != failing:
            _train(parameters, optimizer, range(step, step + 1))
            continue
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", _Broken(os.pwritev, 1 << 16))
            with pytest.raises(
                OSError,
                match=r"\d+ bytes of optimizer states could not be written: cannot write \d+ bytes at offset"
                r" \d+ .*Input/output"
                r" error\. Nothing is lost: the step is complete, .* Save a checkpoint; the next step tries",
            ):
                _train(parameters, optimizer, range(step, step + 1))
            _assert_same(serial, parameters)
            check_state_dict_equal(expected.state_dict(), optimizer.state_dict())
    _assert_same(serial, parameters)
    assert optimizer._offload is not None
    assert not optimizer._offload.pipeline.shelf.kept  # on the disk again


def test_failed_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = _parameters(torch.float32)
    optimizer = _make(parameters, 1.0, tmp_path)
    _train(parameters, optimizer, range(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", _Broken(os.preadv, 0))
        before = [p.detach().clone() for p in parameters]
        for call in (optimizer.step, optimizer.state_dict):
            with pytest.raises(
                OSError, match=rf"cannot read \d+ bytes at offset \d+ .* {tmp_path}: Input/output"
            ):
                call()
        _assert_same(before, parameters)
    optimizer.step()


@small_files(1 << 16)
def test_a_full_disk_is_refused_before_anything_changes(tmp_path: Path) -> None:
    parameters = _parameters(torch.float32)
    optimizer = _make(parameters, 1.0, tmp_path)
    before = [p.detach().clone() for p in parameters]
    for _ in range(2):
        with pytest.raises(
            OSError,
            match=rf"no room to offload to {tmp_path} \(.*\): 2\d+ bytes more are needed .* \d+ are avail",
        ):
            _train(parameters, optimizer, range(1))
    _assert_same(before, parameters)
    assert not optimizer.state
    small = _parameters(torch.float32)[2:4]
    less = optim.HybridAdam(small, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    _grads(small, 0)
    less.step()


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    p = [nn.Parameter(torch.ones(2))]
    for fraction in (-0.1, 1.5, float("nan"), "0.5", True):
        for kind in (optim.CPUAdam, optim.HybridAdam):
            with pytest.raises(
                ValueError, match=rf"{kind.__name__} needs an nvme_offload_fraction between 0 .* got "
            ):
                kind(p, nvme_offload_fraction=fraction)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"file is not a directory and cannot be made"):
        optim.CPUAdam(p, nvme_offload_fraction=1.0, nvme_offload_dir=file)
    with pytest.raises(OSError, match=r"no file can be created in /proc/self"):
        optim.HybridAdam(p, nvme_offload_fraction=1.0, nvme_offload_dir="/proc/self")
    optim.HybridAdam(p, nvme_offload_dir=tmp_path / "missing")  # not used
    assert not (tmp_path / "missing").exists()
    optim.HybridAdam(p, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path / "missing" / "too")  # made
    assert (tmp_path / "missing").is_dir()
    optimizer = optim.HybridAdam(p, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    p[0].grad = torch.ones(2)
    optimizer.step()
    p[0].data = torch.ones(2, 2)[:, 0]
    p[0].grad = torch.ones(2)
    with pytest.raises(
        RuntimeError,
        match=r"\(2,\) was on the CPU with strides \(1,\) .* now it is on cpu with strides \(2,\)",
    ):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_whose_elements_change_places(dtype: torch.dtype, tmp_path: Path) -> None:
    """Their states do not move with them, so a step is refused; a state dict is still right."""
    model = nn.Conv2d(3, 4, 5, bias=False).to(dtype)
    optimizer = optim.HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    model.weight.grad = torch.randn(model.weight.shape).to(dtype)
    optimizer.step()
    before = optimizer.state_dict()
    model.to(memory_format=torch.channels_last)
    model.weight.grad = torch.randn(model.weight.shape).to(dtype)
    with pytest.raises(
        RuntimeError, match=r"with strides \(75, 25, 5, 1\) .* with strides \(75, 1, 15, 3\)\. Save a"
    ):
        optimizer.step()
    check_state_dict_equal(optimizer.state_dict(), before)
    optimizer.load_state_dict(before)
    optimizer.step()


def test_states_that_a_wrapper_would_lose(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = optim.HybridAdam([weight], nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = other = nn.Parameter(torch.ones(2))
    optimizer.state[other] = optimizer.state.pop(weight)
    other.grad = torch.ones(2)
    with pytest.raises(
        RuntimeError, match=r"shape \(2,\) are on the disk for another one, .* Wrap the optimizer before"
    ):
        optimizer.step()


def test_parameters_with_gaps_stay_in_memory(tmp_path: Path) -> None:
    results = []
    for fraction in (0.0, 1.0):
        p = nn.Parameter(torch.arange(12.0).reshape(4, 3)[:, :2])
        p.grad = torch.ones(4, 2)
        optimizer = optim.CPUAdam(
            [p, nn.Parameter(torch.empty(0))],
            lr=0.1,
            nvme_offload_fraction=fraction,
            nvme_offload_dir=tmp_path,
        )
        optimizer.step()
        assert "exp_avg" in optimizer.state[p]
        results.append([p])
    _assert_same(*results)


@pytest.mark.gpu
def test_parameters_on_the_gpu_stay_there(tmp_path: Path) -> None:
    results = []
    for fraction in (0.0, 1.0):
        parameters = _parameters(torch.bfloat16)
        for i in (0, 5):
            parameters[i] = nn.Parameter(parameters[i].detach().cuda())
        optimizer = _make(parameters, fraction, tmp_path)
        for step in range(3):
            _grads([p for p in parameters if not p.is_cuda], step)
            for p in parameters:
                if p.is_cuda:
                    p.grad = torch.full_like(p, 0.1 * step)
            optimizer.step()
        assert "exp_avg" in optimizer.state[parameters[0]]
        results.append(parameters)
    _assert_same(*results)


def test_the_base_class(tmp_path: Path) -> None:
    class Sign(NVMeOptimizer):
        """w <- w - lr sign(m), m <- (m + g) / 2"""

        def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
            return ("m",)

        def update(self, bucket: Any, group: dict[str, Any]) -> None:
            for w, g, m in zip(bucket.weights, bucket.grads, bucket.states["m"], strict=True):
                m.add_(g).div_(2)
                w.sub_(group["lr"] * m.sign())

    results = []
    for fraction in (0.0, 0.5):
        parameters = _parameters(torch.float32)
        optimizer = Sign(parameters, {"lr": 0.1}, nvme_offload_fraction=fraction, offload_dir=tmp_path)
        for step in range(3):
            _grads(parameters, step)
            optimizer.step()
        results.append(parameters)
    _assert_same(*results)
