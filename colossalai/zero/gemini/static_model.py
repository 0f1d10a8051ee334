"""An ordinary copy of a model whose weights lie in chunks."""

from __future__ import annotations

import copy

import torch
from torch import nn

from colossalai.zero.gemini.chunk import Slot
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.hooks import without_hooks


def get_static_torch_model(
    zero_ddp_model: ZeroDDP,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    only_rank_0: bool = True,
) -> nn.Module:
    """An ordinary copy of the model, with whole weights, on the first rank (on the others with NaN, unless not ``only_rank_0``)."""
    state = zero_ddp_model.state_dict(only_rank_0=only_rank_0)
    empty = {
        id(slot.param): _empty(slot) for chunk in zero_ddp_model.chunk_manager.chunks for slot in chunk.slots
    }
    model = without_hooks(copy.deepcopy(zero_ddp_model.unwrap(), empty)).to_empty(device=device).to(dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
    if state:
        model.load_state_dict(state)
    return model


def _empty(slot: Slot) -> nn.Parameter:
    """A copy without values, also of a parameter whose values are elsewhere."""
    copied: nn.Parameter = slot.kind(
        torch.empty(slot.shape, dtype=slot.view.dtype, device="meta"), slot.param.requires_grad
    )
    copied.__dict__.update(slot.param.__dict__)
    return copied
