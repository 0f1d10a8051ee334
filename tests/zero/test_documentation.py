"""The wrappers that the page about ZeRO names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colossalai.mesh import own_grad
from colossalai.zero import zero_model_wrapper, zero_optim_wrapper


def test_wrappers() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="zero_stage=4"):
        zero_model_wrapper(model, zero_stage=4)
    with pytest.raises(ValueError, match="gemini_config for stage 3 only"):
        zero_model_wrapper(model, 1, {"device": "cpu"})
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="needs the model that zero_model_wrapper returned"):
        zero_optim_wrapper(model, adam)
    assert zero_model_wrapper(model, 2) is model
    with pytest.raises(ValueError, match="sets partition_grad by the stage of the model"):
        zero_optim_wrapper(model, adam, optim_config={"partition_grad": True})
    optimizer = zero_optim_wrapper(model, adam, max_norm=0.1, optim_config={"cpu_offload": True})
    optimizer.backward(model(torch.ones(1, 3)).sum())
    assert own_grad(model.weight) is None  # stage 2 keeps shards only
    optimizer.step()
    assert optimizer.grad_norm is not None
