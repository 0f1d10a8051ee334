"""The layers with weights that every model here is made of, drawn as GPT-2 draws them.

All other modules build their layers through these functions, so this file alone decides which class a
``Linear`` is.  They are those of ``colossalai.nn``: one model file serves one device and every
tensor-parallel mode.

GPT-2 draws every weight from a normal distribution of standard deviation 0.02 and starts biases at zero.
The two projections of a block that write into the residual stream are drawn narrower, by
``1 / sqrt(number of such projections in the model)``: their outputs are summed, and the sum of ``2 * depth``
independent terms would otherwise grow with the depth.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colossalai.mesh import Layout, move, replicated
from colossalai.nn import Classifier, Dropout, Embedding, LayerNorm, Linear, PatchEmbedding, init
from colossalai.nn.layer.dropout import exact_stream
from colossalai.nn.layer.embedding import WholeEmbedding
from colossalai.nn.sequence import SequenceParallel

INIT_STD = 0.02


def residual_std(depth: int) -> float:
    """Standard deviation of a projection into the residual stream of a model with ``depth`` blocks."""
    return INIT_STD / math.sqrt(2 * depth)


def linear(
    in_features: int,
    out_features: int,
    *,
    role: Literal["expand", "contract"],
    fused: int = 1,
    bias: bool = True,
    std: float = INIT_STD,
    dtype: torch.dtype | None = None,
) -> Linear:
    """``role``: from the residual stream (expand) or back into it (contract)."""
    return Linear(
        in_features,
        out_features,
        bias,
        dtype,
        init.normal_(std=std),
        init.zeros_(),
        role=role,
        fused=fused,
    )


def classifier(
    in_features: int,
    num_classes: int,
    *,
    weight: nn.Parameter | None = None,
    bias: bool = True,
    dtype: torch.dtype | None = None,
) -> Classifier:
    """Scores of classes or words; with ``weight`` tied to an embedding's table."""
    return Classifier(
        in_features, num_classes, weight, bias, dtype, init.normal_(std=INIT_STD), init.zeros_()
    )


def embedding(
    num_embeddings: int,
    dim: int,
    *,
    padding_idx: int | None = None,
    dtype: torch.dtype | None = None,
    split_hidden: bool = False,
) -> Embedding:
    """``split_hidden`` cuts the table along ``dim`` under tensor parallelism; otherwise the mode chooses."""
    kind = WholeEmbedding if split_hidden else Embedding
    return kind(num_embeddings, dim, padding_idx, dtype, init.normal_(std=INIT_STD))


def patches(
    img_size: int, patch_size: int, in_channels: int, dim: int, *, dtype: torch.dtype | None = None
) -> PatchEmbedding:
    """A class token, then one vector of ``dim`` features for each square of ``patch_size`` pixels; with
    positions.
    """
    return PatchEmbedding(
        img_size,
        patch_size,
        in_channels,
        dim,
        dtype,
        True,
        init.normal_(std=INIT_STD),
        init.zeros_(),
        init.trunc_normal_(std=INIT_STD),
    )


def layer_norm(dim: int, *, eps: float = 1e-5, dtype: torch.dtype | None = None) -> LayerNorm:
    return LayerNorm(dim, eps, dtype=dtype)


def own_tokens(x: Tensor, sequence: SequenceParallel | None, dim: int = 1) -> Tensor:
    """This rank's tokens of ``x``, whose ``dim`` is a whole sequence; all of them if it is not cut."""
    if sequence is None:
        return x
    length = x.size(dim)
    if exact_stream() is not None and sequence.padded(length) != length:
        raise ValueError(
            f"plan_independent_dropout cannot draw alike for a sequence of {length} tokens, which is padded"
            f" to {sequence.padded(length)} to be cut over {sequence.size} ranks; give it that length"
        )
    return sequence.cut(x, dim)


def routed_tokens(
    x: Tensor,
    real: Tensor | None,
    length: int | None,
    place: dict[str, Any],
    sequence: SequenceParallel | None,
) -> Tensor | None:
    """Which of this rank's tokens ``x`` go to experts: those that are neither padding nor only there to fill
    a sequence; None if all do, in sequences that are not cut.

    Args:
        real: (batch, length) False at padding, of the whole batch; None if there is none.
        length: of the whole sequences; None if it is not known, as on later stages of a pipeline.
        place: the tensor mode and its mesh.
    """
    if sequence is not None:
        if length is None:
            raise ValueError(
                "sequences are cut over ranks, and experts must know their length to tell tokens from what"
                " only fills a sequence; give a pipeline batches that are dicts, {'input_ids': ...}"
            )
        if real is None:
            real = torch.ones(len(x), length, dtype=torch.bool, device=x.device)
        return sequence.cut(real.long()).bool()
    tp, mesh = place["tp"], place["mesh"]
    if real is None or mesh is None or tp.size == 1:
        return real
    return move(real.long(), replicated(2), Layout(tp.hidden.dims[:2]), mesh).bool()


def dropout(p: float) -> Dropout:
    """Dropout in the residual stream."""
    return Dropout(p, at="hidden")
