"""BERT as pipeline stages, under any tensor mode: stages of ``titans.model.bert.BERT``.

The word embedding lies on the first stage and, as the output head that it is tied to, on the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from titans.model.bert import BERT, run_layers
from titans.model.stages import Stage, build_pipeline, share_table


class BertStage(Stage):
    """Some layers of a BERT.  ``hidden_states`` come from the stage before; the rest is the batch."""

    def forward(
        self,
        hidden_states: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        if self.embed is not None and input_ids is None:
            hidden_states, input_ids = None, hidden_states  # a batch that is a tensor, not a dict
        return run_layers(self, hidden_states, input_ids, attention_mask, token_type_ids)


def build_bert_pipeline(
    num_layers: int, num_chunks: int = 1, device: torch.device | None = None, **kwargs: Any
) -> nn.Module:
    """This rank's stages of a BERT with ``num_layers`` blocks; further arguments are those of ``BERT``."""
    stages = build_pipeline(
        lambda: BERT(depth=num_layers, **kwargs), BertStage, num_layers, num_chunks, device
    )
    if kwargs.get("tied", True):
        share_table(stages)
    return stages
