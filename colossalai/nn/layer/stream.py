"""Changes of place that a model asks for by name: the first token of a sequence, and back to the residual
stream.

``at`` is where the model lives, ``current()`` when it was built; by default where the job is now.
"""

from __future__ import annotations

from torch import Tensor

from colossalai.mesh import Layout, redistribute
from colossalai.nn.modes import Current, at_rank, current


def first_token(x: Tensor, at: Current | None = None) -> Tensor:
    """``x[:, 0]`` of (batch, sequence, features) in the residual stream, also where the sequence is cut."""
    tp, mesh = at or current()
    batch, sequence, feature = tp.hidden.dims
    if mesh is None or not sequence:
        return x[:, 0]
    # every rank gives its first token, all keep the first of these
    return redistribute(x[:, :1], tp.hidden, Layout((batch, (), feature)), mesh)[:, 0]


def to_hidden(x: Tensor, at: Current | None = None) -> Tensor:
    """From where an expanding Linear leaves ``x`` to the residual stream's own layout, without a contracting
    Linear.
    """
    tp, mesh = at or current()
    if mesh is None or tp.size == 1:
        return x
    return redistribute(x, at_rank(tp.inner, x.ndim), at_rank(tp.hidden, x.ndim), mesh)


def local_heads(num_heads: int, at: Current | None = None) -> int:
    """How many of an attention's heads this rank computes: heads are features, and are cut like those."""
    tp, mesh = at or current()
    if mesh is None or tp.size == 1:
        return num_heads
    axes = tp.inner.dims[-1]
    parts = mesh.group_size(*axes)
    if num_heads % parts:
        below = num_heads // parts * parts
        raise ValueError(
            f"num_heads={num_heads} is shared by {' x '.join(f'{a}={mesh.size[a]}' for a in axes)} and must"
            f" be a multiple of {parts}; the nearest valid numbers are"
            f" {f'{below} and {below + parts}' if below else parts}"
        )
    return num_heads // parts
