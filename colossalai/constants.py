"""The tensor modes by name, the initializer of each, and the marks on parameters."""

from __future__ import annotations

ALLOWED_MODES: list[str | None] = [None, "1d", "2d", "2.5d", "3d", "sequence"]

# What makes the process groups of each part of the `parallel` config.  Add a row to add a tensor mode of your
# own: INITIALIZER_MAPPING["new_mode"] = "MyInitializer" (docs/source/en/parallel_context.md).
INITIALIZER_MAPPING: dict[str, str] = {
    "data": "Initializer_Data",
    "model": "Initializer_Model",
    "pipeline": "Initializer_Pipeline",
    "tensor": "Initializer_Tensor",
    "1d": "Initializer_1D",
    "2d": "Initializer_2D",
    "2.5d": "Initializer_2p5D",
    "3d": "Initializer_3D",
    "sequence": "Initializer_Sequence",
    "moe": "Initializer_Moe",
    "embedding": "Initializer_Embedding",
}

# Attributes of a parameter that a tensor-parallel layer holds only in part.
IS_TENSOR_PARALLEL = "is_tensor_parallel"
NUM_PARTITIONS = "num_partitions"
TENSOR_PARALLEL_ATTRIBUTES = [IS_TENSOR_PARALLEL, NUM_PARTITIONS]
