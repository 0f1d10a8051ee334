"""Beam search of a model whose rows are cut: a rank has the keys and values of its own rows, and the beams
that go on are numbered among all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from colossalai.mesh import Axes, Layout, Mesh, unshard
from colossalai.mesh.layout import local_range
from colossalai.nn.modes import TensorParallel
from colossalai.nn.policies.wrap_forward import ForwardWrapper


class CutCache(ForwardWrapper):
    """A model whose cache holds this rank's rows; ``generate`` calls ``_reorder_cache`` where a model has
    it.
    """

    cut_as: tuple[TensorParallel, Mesh]

    def _reorder_cache(self, cache: Any, beams: Tensor) -> Any:
        """Let row ``i`` of all rows go on from what row ``beams[i]`` has seen."""
        tp, mesh = self.cut_as
        axes = tp.inner.dims[0]
        start, length = local_range(len(beams), axes, mesh)
        rows = torch.arange(len(beams), device=beams.device)
        if torch.equal(beams // length, rows // length):  # every rank knows all beams, and decides alike
            cache.reorder_cache(beams[start : start + length] - start)
            return cache
        for layer in _layers(cache):  # beams of one sample lie on several ranks
            if layer.get_seq_length() > 0:
                layer.keys, layer.values = (_all_rows(t, axes, mesh) for t in (layer.keys, layer.values))
        cache.reorder_cache(beams[start : start + length])
        return cache


def _layers(cache: Any) -> Iterator[Any]:
    """The layers of a cache, or of the two of an encoder and a decoder."""
    for part in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, part):
            yield from getattr(cache, part).layers
    yield from getattr(cache, "layers", ())


def _all_rows(rows: Tensor, axes: Axes, mesh: Mesh) -> Tensor:
    return unshard(rows, Layout((axes, *((),) * (rows.ndim - 1))), mesh)
