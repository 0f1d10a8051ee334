"""The helpers of this package under their documented path."""

from colossalai.checkpoint_io.files import load_shard_state_dict, save_state_dict
from colossalai.checkpoint_io.names import add_variant, get_base_filenames, get_shard_filename, has_index_file
from colossalai.checkpoint_io.sharding import calculate_tensor_size, shard_checkpoint

__all__ = [
    "add_variant",
    "calculate_tensor_size",
    "get_base_filenames",
    "get_shard_filename",
    "has_index_file",
    "load_shard_state_dict",
    "save_state_dict",
    "shard_checkpoint",
]
