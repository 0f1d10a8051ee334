"""GPT as pipeline stages, under any tensor mode: stages of ``titans.model.gpt.GPT``.

The word embedding lies on the first stage and, as the output head that it is tied to, on the last.  The names
with ``1D`` and ``hybrid`` build the same stages; the tensor mode is the config's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titans.layer.block import Checkpoint
from titans.model.gpt import GPT, run_layers
from titans.model.stages import Stage, build_pipeline, share_table


class GPTStage(Stage):
    """Some layers of a GPT.  ``hidden_states`` come from the stage before; the rest is the batch."""

    def forward(
        self,
        hidden_states: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        if self.embed is not None and input_ids is None:
            hidden_states, input_ids = None, hidden_states  # a batch that is a tensor, not a dict
        return run_layers(self, hidden_states, input_ids, attention_mask, position_ids)


def build_gpt_pipeline(
    num_layers: int,
    num_chunks: int = 1,
    device: torch.device | None = None,
    model: Callable[..., GPT] = GPT,
    **kwargs: Any,
) -> nn.Module:
    """This rank's stages of a GPT with ``num_layers`` blocks; further arguments are those of ``model``, such
    as ``GPT`` or ``MOEGPT``.
    """
    stages = build_pipeline(
        lambda: model(depth=num_layers, **kwargs), GPTStage, num_layers, num_chunks, device
    )
    if kwargs.get("tied", True):
        share_table(stages)
    return stages


# name -> blocks, and what differs from GPT's defaults.  Heads are numbers that 4 tensor-parallel ranks can
# share.
_SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2_small": (12, {"hidden_size": 768, "num_heads": 12}),
    "gpt2_exlarge": (48, {"hidden_size": 1600, "num_heads": 32}),
    "gpt3": (96, {"hidden_size": 12288, "num_heads": 96, "max_position_embeddings": 2048}),
}


def _build(
    size: str,
    num_chunks: int,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    split: bool,
    fused: bool,
    tied: bool,
) -> nn.Module:
    depth, sizes = _SIZES[size]
    # the named pipelines train without dropout
    plain: dict[str, Any] = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    return build_gpt_pipeline(
        depth,
        num_chunks,
        checkpoint=checkpoint,
        dtype=dtype,
        embed_split_hidden=split,
        fuse_scale_mask_softmax=fused,
        tied=tied,
        **sizes,
        **plain,
    )


def GPT2_small_pipeline_1D(
    num_chunks: int = 1,
    checkpoint: Checkpoint = False,
    dtype: torch.dtype = torch.float,
    embed_split_hidden: bool = False,
    fused: bool = False,
    tied: bool = True,
) -> nn.Module:
    """This rank's stages of GPT-2 with 124 million parameters."""
    return _build("gpt2_small", num_chunks, checkpoint, dtype, embed_split_hidden, fused, tied)


def GPT2_exlarge_pipeline_1D(
    num_chunks: int = 1,
    checkpoint: Checkpoint = False,
    dtype: torch.dtype = torch.float,
    embed_split_hidden: bool = False,
    fused: bool = False,
    tied: bool = True,
) -> nn.Module:
    """This rank's stages of GPT-2 with 1.6 billion parameters, and 32 heads."""
    return _build("gpt2_exlarge", num_chunks, checkpoint, dtype, embed_split_hidden, fused, tied)


def GPT3_pipeline_1D(
    num_chunks: int = 1,
    checkpoint: Checkpoint = False,
    dtype: torch.dtype = torch.float,
    embed_split_hidden: bool = False,
    fused: bool = False,
    tied: bool = True,
) -> nn.Module:
    """This rank's stages of GPT-3 with 175 billion parameters."""
    return _build("gpt3", num_chunks, checkpoint, dtype, embed_split_hidden, fused, tied)


GPT2_small_pipeline_hybrid = GPT2_small_pipeline_1D
GPT2_exlarge_pipeline_hybrid = GPT2_exlarge_pipeline_1D
GPT3_pipeline_hybrid = GPT3_pipeline_1D
