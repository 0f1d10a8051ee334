"""The benchmark of experts runs, with a toy, and its one-hot form computes what the layer does."""

from __future__ import annotations

import torch

from benchmarks.experts import SMALL, OneHot, gpt_rows, ours, rows


def test_a_toy_runs() -> None:
    found = rows(SMALL, (4,), torch.device("cpu"))
    assert [row.peer_name.split()[0] for row in found][:2] == ["its", "one-hot"]
    found += gpt_rows(torch.device("cpu"), 64, 32, 2)
    assert all(row.ours > 0 and row.peer > 0 for row in found)


def test_the_one_hot_form_is_the_same_layer() -> None:
    torch.manual_seed(0)
    layer, x = ours(SMALL, 4), torch.randn(32, SMALL.width)
    torch.testing.assert_close(OneHot(layer)(x), layer(x), rtol=1e-4, atol=1e-5)
