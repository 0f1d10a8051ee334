"""Values of tensors are put back."""

from __future__ import annotations

import torch
from torch import nn

from colossalai.utils.kept_values import KeptValues


def test_what_is_written_is_put_back() -> None:
    linear, moved, whole = nn.Linear(3, 3), nn.Parameter(torch.rand(3)), torch.rand(4)
    part = whole[1:3]
    tensors = [linear.weight, linear.bias, moved, part]
    before = [tensor.detach().clone() for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    kept = KeptValues(tensors)
    with kept:
        linear.bias.data.mul_(2)
        with torch.no_grad():
            moved.add_(1)
        moved.data = torch.zeros(5)
        whole.zero_()
        linear(torch.ones(2, 3)).sum().backward()
    assert len(kept.copies) == 3  # not of the weight, which is only read
    kept.restore()
    assert all(torch.equal(tensor, known) for tensor, known in zip(tensors, before, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == places
