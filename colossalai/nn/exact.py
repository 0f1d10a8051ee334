"""Exact results: what a model computes for a row does not depend on the batch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from colossalai.kernel.exact_mode import exact_operations, is_exact
from colossalai.mesh.collectives import sums_in_rank_order


@contextmanager
def exact_mode() -> Iterator[None]:
    """Compute in this block what does not depend on the batch, bit for bit.

    The log-probabilities of a forward pass in training are then those of ``Generator(exact=True)``, for any
    batch of either.  The model is not edited: products, attention (``scaled_dot_product_attention``), norms,
    softmax and sums along the last dim have one order of additions, and sums over the ranks of a cut model
    are added in the order of ranks.  Gradients flow; they are torch's.  An operation without such a form is
    refused by its name.
    """
    with exact_operations(), sums_in_rank_order():
        yield


__all__ = ["exact_mode", "is_exact"]
