"""The helpers of this package under their documented path."""

from colossalai.checkpoint_io.files.sharding import (
    add_variant,
    calculate_tensor_size,
    get_base_filenames,
    get_shard_filename,
    has_index_file,
    shard_checkpoint,
)
from colossalai.checkpoint_io.files.state_file import load_shard_state_dict, save_state_dict


def is_safetensors_available() -> bool:
    """Return whether safetensors can be imported; it comes with this package."""
    return True


__all__ = [
    "add_variant",
    "calculate_tensor_size",
    "get_base_filenames",
    "get_shard_filename",
    "has_index_file",
    "is_safetensors_available",
    "load_shard_state_dict",
    "save_state_dict",
    "shard_checkpoint",
]
