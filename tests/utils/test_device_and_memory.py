from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from colossalai import utils
from colossalai.logging import DistributedLogger
from colossalai.utils.memory import device as memory


def test_the_current_device() -> None:
    expected = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    assert str(utils.get_current_device()) == expected
    utils.synchronize()
    utils.empty_cache()


def test_modules_move_in_place_whatever_holds_them() -> None:
    one, two, three = (nn.Linear(2, 2) for _ in range(3))
    assert utils.set_to_cuda(one) is one
    both = [two, {"third": three}]
    assert utils.set_to_cuda(both) is both
    assert {p.device for m in (one, two, three) for p in m.parameters()} == {utils.get_current_device()}
    with pytest.raises(TypeError, match=r"set_to_cuda moves modules .* got Tensor"):
        utils.set_to_cuda(torch.ones(2))


@pytest.fixture
def own_capacity() -> Iterator[None]:
    yield
    utils.colo_set_cpu_memory_capacity(None)


def test_cpu_memory(own_capacity: None) -> None:
    real = utils.colo_get_cpu_memory_capacity()
    assert 2**28 < real < 2**46
    before = utils.colo_device_memory_used("cpu")
    filled = torch.ones(2**25)
    assert utils.colo_device_memory_used(torch.device("cpu")) - before > 2**26
    assert before < real
    del filled
    utils.colo_set_cpu_memory_capacity(10 * 2**30)
    assert utils.colo_device_memory_capacity("cpu") == utils.colo_get_cpu_memory_capacity() == 10 * 2**30
    utils.colo_set_cpu_memory_capacity(None)
    assert utils.colo_device_memory_capacity(torch.device("cpu")) == real


@pytest.mark.parametrize(("limit", "used"), [("1048576\n", 1048576), ("max\n", None), ("9" * 19, None)])
def test_a_containers_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, used: int | None
) -> None:
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", ())
    machine = utils.colo_get_cpu_memory_capacity()
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "absent")))
    assert utils.colo_get_cpu_memory_capacity() == (used or machine)


def test_bad_memory_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="positive number of bytes, got 0"):
        utils.colo_set_cpu_memory_capacity(0)
    with pytest.raises(ValueError, match="'cpu' and 'cuda' devices, got 'meta'"):
        utils.colo_device_memory_capacity("meta")
    for ratio in (0, 1.5):
        with pytest.raises(ValueError, match=f"above 0 and at most 1, got {ratio}"):
            utils.colo_set_process_memory_fraction(ratio)


def test_the_report(tmp_path: Path) -> None:
    logger = DistributedLogger("report")
    logger.log_to_file(tmp_path)
    utils.report_memory_usage("after step 1", logger=logger, report_cpu=True)
    text = (tmp_path / "rank_0.log").read_text()
    assert "INFO: after step 1: " in text
    assert float(text.split("CPU: resident ")[1].split(" MB")[0]) > 10


def test_a_fraction_without_cuda_is_not_ignored_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory, "get_dist_logger", lambda: DistributedLogger("fraction"))
    utils.colo_set_process_memory_fraction(0.5)
    assert "colo_set_process_memory_fraction has no effect without CUDA" in capsys.readouterr().err


@pytest.mark.gpu
def test_cuda_memory(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    assert utils.colo_device_memory_capacity("cuda") == total
    before = utils.colo_device_memory_used("cuda")
    filled = torch.ones(2**20, device="cuda")
    assert utils.colo_device_memory_used("cuda") - before == 2**22
    del filled
    utils.colo_set_process_memory_fraction(0.5)
    assert utils.colo_device_memory_capacity("cuda:0") == int(total * 0.5)
    utils.colo_set_process_memory_fraction(1.0)
    logger = DistributedLogger("cuda report")
    logger.log_to_file(tmp_path)
    utils.report_memory_usage("now", logger)
    text = (tmp_path / "rank_0.log").read_text()
    assert "GPU: allocated " in text
    assert "CPU" not in text
