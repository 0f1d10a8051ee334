"""Functions on ColoTensors by their documented names.

ColoTensors answer torch's own functions, so these are torch's own functions.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai.global_variables import tensor_parallel_env

colo_addmm = torch.addmm
colo_batch_norm = F.batch_norm
colo_cross_entropy = F.cross_entropy
colo_embedding = F.embedding
colo_embedding_bag = F.embedding_bag
colo_layernorm = F.layer_norm
colo_linear = F.linear
colo_view = Tensor.view


def set_parallel_input(input_parallel: bool) -> None:
    """Note whether the inputs of layers are cut; the specs of ColoTensors say it, so this changes nothing
    else.
    """
    warnings.warn(
        "set_parallel_input has no effect on what is computed: the spec of a ColoTensor, and the mode of a"
        " layer, say whether an input is cut",
        stacklevel=2,
    )
    tensor_parallel_env.parallel_input_1d = input_parallel


def get_parallel_input() -> bool:
    """Return what was noted by ``set_parallel_input``."""
    return tensor_parallel_env.parallel_input_1d
