"""The losses under the names of the modes."""

from __future__ import annotations

from colossalai.nn.loss.cross_entropy import CrossEntropyLoss
from colossalai.registry import LOSSES


@LOSSES.register_module
class VocabParallelCrossEntropyLoss1D(CrossEntropyLoss):
    """1D, for scores that are cut along the classes."""

    mode = "1d"
    cut = True


@LOSSES.register_module
class CrossEntropyLoss2D(CrossEntropyLoss):
    """2D, for scores that are whole."""

    mode = "2d"
    cut = False


@LOSSES.register_module
class VocabParallelCrossEntropyLoss2D(CrossEntropyLoss):
    """2D, for scores that are cut along the classes."""

    mode = "2d"
    cut = True


@LOSSES.register_module
class CrossEntropyLoss2p5D(CrossEntropyLoss):
    """2.5D, for scores that are whole."""

    mode = "2.5d"
    cut = False


@LOSSES.register_module
class VocabParallelCrossEntropyLoss2p5D(CrossEntropyLoss):
    """2.5D, for scores that are cut along the classes."""

    mode = "2.5d"
    cut = True


@LOSSES.register_module
class CrossEntropyLoss3D(CrossEntropyLoss):
    """3D, for scores that are whole."""

    mode = "3d"
    cut = False


@LOSSES.register_module
class VocabParallelCrossEntropyLoss3D(CrossEntropyLoss):
    """3D, for scores that are cut along the classes."""

    mode = "3d"
    cut = True
