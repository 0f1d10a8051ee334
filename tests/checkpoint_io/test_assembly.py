"""``assemble``: whole tensors from boxes on several ranks, uneven ones, on the first rank and on all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.checkpoint_io.assembly import assemble
from colossalai.checkpoint_io.boxes import Box, whole
from colossalai.testing import spawn

# of a 5 x 4 tensor, with the rank that holds it
SOURCES = [(Box((0, 0), (2, 3)), 2), (Box((0, 3), (5, 1)), 0), (Box((2, 0), (3, 3)), 1)]


def _serial() -> Tensor:
    return torch.arange(20, dtype=torch.bfloat16).view(5, 4)


def _assembled(rank: int, world_size: int, port: int) -> list[Tensor | None]:
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world_size)
    asked: list[Box] = []

    def read(box: Box) -> Tensor:
        asked.append(box)
        return _serial()[box.within(whole((5, 4)))].requires_grad_()

    group = dist.group.WORLD
    found = [
        assemble((5, 4), torch.bfloat16, SOURCES, read, group, everywhere=everywhere)
        for everywhere in (False, True)
    ]
    own = [box for box, source in SOURCES if source == rank]
    assert asked == own * 2  # a rank reads what it sends, and nothing else
    dist.destroy_process_group()
    return found


def test_boxes_of_three_ranks() -> None:
    for rank, (first, everywhere) in enumerate(spawn(_assembled, 3)):
        assert (first is None) == (rank > 0)
        for found in (everywhere, first) if rank == 0 else (everywhere,):
            assert not found.requires_grad
            assert torch.equal(found, _serial())


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_process_alone_needs_no_group(everywhere: bool) -> None:
    sources = [(box, 0) for box, _ in SOURCES]
    found = assemble(
        (5, 4),
        torch.bfloat16,
        sources,
        lambda box: _serial()[box.within(whole((5, 4)))],
        None,
        everywhere=everywhere,
    )
    assert found is not None
    assert torch.equal(found, _serial())


def test_a_tensor_without_dims() -> None:
    found = assemble((), torch.float32, [(whole(()), 0)], lambda box: torch.tensor(3.0), None)
    assert found is not None
    assert found.item() == 3.0
