"""Checkpoints that do not depend on the plan that wrote them.

- ``runs``: what ``booster.save`` writes and ``booster.load`` reads: boxes of tensors in data files, and a
  manifest.
- ``files``: whole tensors, in one file or in a folder of the layout of Hugging Face.
- ``inspection``: show, verify and convert checkpoints, for the command line.

What they share lies beside them: ``boxes`` (rectangles of tensors), ``held_tensors`` (what a rank holds of
one), ``model_state`` and ``optimizer_state`` (of which tensors), ``stored_optimizer`` (an optimizer by the
names of its parameters), ``write_plan`` (who writes what), ``ranks`` (what ranks tell each other),
``json_values`` and ``byte_io``.
"""

from colossalai.checkpoint_io.files.io import (
    CheckpointIO,
    GatheredCheckpointIO,
    GeneralCheckpointIO,
    ReplicatedCheckpointIO,
)
from colossalai.checkpoint_io.files.pretrained import load_pretrained, read_pretrained, save_pretrained
from colossalai.checkpoint_io.files.sharding import CheckpointIndexFile
from colossalai.checkpoint_io.files.training import load_moe_model, save_moe_model
from colossalai.checkpoint_io.runs.manifest import checkpoints, latest
from colossalai.checkpoint_io.runs.writing import Save

__all__ = [
    "CheckpointIO",
    "CheckpointIndexFile",
    "GatheredCheckpointIO",
    "GeneralCheckpointIO",
    "ReplicatedCheckpointIO",
    "Save",
    "checkpoints",
    "latest",
    "load_moe_model",
    "load_pretrained",
    "read_pretrained",
    "save_moe_model",
    "save_pretrained",
]
