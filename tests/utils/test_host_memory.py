from __future__ import annotations

import gc

import pytest
import torch

from colossalai.utils.memory.host_memory import HUGE, host_empty


@pytest.mark.parametrize("shape", [7, (3, 5), (HUGE // 4 + 1,), 0, ()])
def test_zeros_of_the_shape_and_dtype(shape: int | tuple[int, ...]) -> None:
    found = host_empty(shape, torch.float32, pinned=False)
    assert torch.equal(found, torch.zeros(shape))
    assert found.is_contiguous()


def test_the_memory_lives_as_long_as_a_view_of_it() -> None:
    view = host_empty(HUGE, torch.int16, pinned=False)[HUGE // 2 :]
    gc.collect()
    view.fill_(3)
    assert view.sum().item() == 3 * HUGE // 2


@pytest.mark.gpu
def test_pinned_memory_is_copied_in_the_background() -> None:
    host = host_empty((1 << 20,), torch.float32)
    assert host.is_pinned()
    host.fill_(2.0)
    device = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert device.sum().item() == 2 * (1 << 20)
    del host
    gc.collect()
    assert host_empty((1 << 20,), torch.float32).is_pinned()
