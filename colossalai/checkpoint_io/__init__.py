"""Checkpoints that know nothing of the plan that wrote them.

Whole runs (``booster.save``): ``boxes`` (rectangles), ``entries`` (what a rank holds), ``model_state`` and ``optimizer_state`` (of what),
``run_state`` (of everything), ``make_write_plan`` (who writes what), ``blocks`` (one data file), ``manifest`` (what is in a folder), ``writing`` and ``reading``.

Files of whole tensors, one or a folder with an index in the layout of Hugging Face: ``base`` says what can be asked for, ``general`` does
it for whole tensors, ``replicated`` lets one rank write for all, ``gathered`` does so for tensors that are cut over ranks (``gathering``);
``training`` is one file with everything; ``pretrained`` reads only the pieces that a rank needs,
``whole_pretrained`` is ``save_pretrained`` of a boosted model.  Below them: ``files`` (one file, whole or not at
all), ``names`` (what files are called and how they are found again), ``sharding`` (which tensor goes where), ``index`` (the map of a folder) and
``fitting`` (whether it is the model's).
"""

from colossalai.checkpoint_io.files.io import (
    CheckpointIO,
    GatheredCheckpointIO,
    GeneralCheckpointIO,
    ReplicatedCheckpointIO,
)
from colossalai.checkpoint_io.files.pretrained import load_pretrained, read_pretrained, save_pretrained
from colossalai.checkpoint_io.files.sharding import CheckpointIndexFile
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
    "load_pretrained",
    "read_pretrained",
    "save_pretrained",
]
