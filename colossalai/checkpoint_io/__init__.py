"""Checkpoints: one file or a folder of shards with an index, in the layout of Hugging Face.

``base`` says what can be asked for, ``general`` does it for whole tensors, ``replicated`` lets one rank write for all,
``gathered`` does so for tensors that are cut over ranks; ``pretrained`` reads only the pieces that a rank needs.
Below them: ``files`` (one file, whole or not at all), ``names`` (what files are called and how they are found again),
``sharding`` (which tensor goes where), ``index`` (the map of a folder) and ``fitting`` (whether it is the model's).
"""

from colossalai.checkpoint_io.base import CheckpointIO
from colossalai.checkpoint_io.gathered import GatheredCheckpointIO
from colossalai.checkpoint_io.general import GeneralCheckpointIO
from colossalai.checkpoint_io.index import CheckpointIndexFile
from colossalai.checkpoint_io.pretrained import load_pretrained, read_pretrained
from colossalai.checkpoint_io.replicated import ReplicatedCheckpointIO

__all__ = [
    "CheckpointIO",
    "CheckpointIndexFile",
    "GatheredCheckpointIO",
    "GeneralCheckpointIO",
    "ReplicatedCheckpointIO",
    "load_pretrained",
    "read_pretrained",
]
