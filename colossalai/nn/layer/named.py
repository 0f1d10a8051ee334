"""The layers under the names of the modes: ``Linear2D`` is ``Linear``, and refuses any other mode than 2D.

``Vanilla...`` are serial under any launch.  Nothing is computed here; a class is a row of a table.
Embeddings and patches of 2D, 2.5D and 3D are the first layers of models: they take the whole batch and keep
their rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai.nn.init as init
from colossalai.mesh import Mesh, move
from colossalai.mesh.movement import start_move
from colossalai.nn.layer.base import Fill
from colossalai.nn.layer.batch import TakesWholeBatch
from colossalai.nn.layer.classifier import Classifier, VocabParallelClassifier, WholeClassifier
from colossalai.nn.layer.dropout import Dropout
from colossalai.nn.layer.embedding import VocabParallelEmbedding, WholeEmbedding
from colossalai.nn.layer.linear import Direction, Linear
from colossalai.nn.layer.normalization import LayerNorm
from colossalai.nn.layer.patch import PatchEmbedding
from colossalai.nn.modes import TensorParallel


class Linear1D(Linear):
    """Column- and row-parallel in turn."""

    mode = "1d"
    direction: Direction | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            dtype,
            weight_initializer,
            bias_initializer,
            role=self.direction,
            gather_output=gather_output,
            skip_bias_add=skip_bias_add,
            tp=tp,
            mesh=mesh,
        )


class Linear1D_Col(Linear1D):
    """Column-parallel: each rank computes some of the outputs."""

    direction = "expand"


class Linear1D_Row(Linear):
    """Row-parallel: each rank has some of the inputs, and the outputs are summed.

    ``stream_chunk_num``: without gradients, the outputs are computed in so many parts, and the sum of one
    travels while the next is computed.
    """

    mode = "1d"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        parallel_input: bool = True,
        skip_bias_add: bool = False,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        stream_chunk_num: int = 1,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            dtype,
            weight_initializer,
            bias_initializer,
            role="contract",
            parallel_input=parallel_input,
            skip_bias_add=skip_bias_add,
            tp=tp,
            mesh=mesh,
        )
        if stream_chunk_num < 1:
            raise ValueError(f"Linear1D_Row: stream_chunk_num is at least 1, got {stream_chunk_num}")
        self.stream_chunk_num = stream_chunk_num

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        if self.plain or self.stream_chunk_num == 1 or torch.is_grad_enabled():
            return super().forward(x)
        plan = self._plans.get(x.ndim) or self._new_plan(x.ndim)
        x = move(x, plan.x, plan.x_use, self.mesh)
        under_way = [
            start_move(F.linear(x, rows), plan.y_use, plan.y, self.mesh)
            for rows in self.weight.chunk(self.stream_chunk_num)
        ]
        y = torch.cat([finish() for finish in under_way], -1)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias


class Linear2D(Linear):
    """Inputs, weights and outputs lie on a square of ranks."""

    mode = "2d"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        skip_bias_add: bool = False,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        *,
        role: Direction | None = None,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            dtype,
            weight_initializer,
            bias_initializer,
            role=role,
            skip_bias_add=skip_bias_add,
            tp=tp,
            mesh=mesh,
        )


class Linear2p5D(Linear2D):
    """Several squares of ranks, each with its own rows of the batch."""

    mode = "2.5d"


class Linear3D(Linear2D):
    """Inputs, weights and outputs lie on a cube of ranks."""

    mode = "3d"


class VanillaLinear(Linear):
    """Serial."""

    mode = None


class Classifier1D(WholeClassifier):
    """1D, with whole scores."""

    mode = "1d"


class VocabParallelClassifier1D(VocabParallelClassifier):
    """1D, with scores cut along the classes; with ``gather_output`` whole on every rank."""

    mode = "1d"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: nn.Parameter | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(
            in_features,
            num_classes,
            weight,
            bias,
            dtype,
            weight_initializer,
            bias_initializer,
            gather_output=gather_output,
            tp=tp,
            mesh=mesh,
        )


class Embedding1D(WholeEmbedding):
    """1D, with a table that is not cut along the vocabulary."""

    mode = "1d"


class VocabParallelEmbedding1D(VocabParallelEmbedding):
    """1D, with a table cut along the vocabulary."""

    mode = "1d"


class LayerNorm1D(LayerNorm):
    """1D."""

    mode = "1d"


class PatchEmbedding1D(PatchEmbedding):
    """1D."""

    mode = "1d"


class Classifier2D(WholeClassifier):
    """2D, with whole scores."""

    mode = "2d"


class VocabParallelClassifier2D(VocabParallelClassifier):
    """2D, with scores cut along the classes."""

    mode = "2d"


class Embedding2D(TakesWholeBatch, WholeEmbedding):
    """2D, of the whole batch, with a table that is not cut along the vocabulary."""

    mode = "2d"


class VocabParallelEmbedding2D(TakesWholeBatch, VocabParallelEmbedding):
    """2D, of the whole batch, with a table cut along the vocabulary."""

    mode = "2d"


class LayerNorm2D(LayerNorm):
    """2D."""

    mode = "2d"


class PatchEmbedding2D(TakesWholeBatch, PatchEmbedding):
    """2D; of the whole batch."""

    mode = "2d"

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        in_chans: int,
        embed_size: int,
        flatten: bool = True,
        dtype: torch.dtype | None = None,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        position_embed_initializer: Fill | None = init.POSITIONS,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        fills = weight_initializer, bias_initializer, position_embed_initializer
        sizes = img_size, patch_size, in_chans, embed_size
        super().__init__(*sizes, dtype, flatten, *fills, tp=tp, mesh=mesh)


class Classifier2p5D(WholeClassifier):
    """2.5D, with whole scores."""

    mode = "2.5d"


class VocabParallelClassifier2p5D(VocabParallelClassifier):
    """2.5D, with scores cut along the classes."""

    mode = "2.5d"


class Embedding2p5D(TakesWholeBatch, WholeEmbedding):
    """2.5D, of the whole batch, with a table that is not cut along the vocabulary."""

    mode = "2.5d"


class VocabParallelEmbedding2p5D(TakesWholeBatch, VocabParallelEmbedding):
    """2.5D, of the whole batch, with a table cut along the vocabulary."""

    mode = "2.5d"


class LayerNorm2p5D(LayerNorm):
    """2.5D."""

    mode = "2.5d"


class PatchEmbedding2p5D(PatchEmbedding2D):
    """2.5D; of the whole batch."""

    mode = "2.5d"


class Classifier3D(WholeClassifier):
    """3D, with whole scores."""

    mode = "3d"


class VocabParallelClassifier3D(VocabParallelClassifier):
    """3D, with scores cut along the classes."""

    mode = "3d"


class Embedding3D(TakesWholeBatch, WholeEmbedding):
    """3D, of the whole batch, with a table that is not cut along the vocabulary."""

    mode = "3d"


class VocabParallelEmbedding3D(TakesWholeBatch, VocabParallelEmbedding):
    """3D, of the whole batch, with a table cut along the vocabulary."""

    mode = "3d"


class PatchEmbedding3D(PatchEmbedding2D):
    """3D; of the whole batch."""

    mode = "3d"


class LayerNorm3D(LayerNorm):
    """3D."""

    mode = "3d"

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-12,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, bias, dtype, tp=tp, mesh=mesh)


class Dropout1D(Dropout):
    """1D."""

    mode = "1d"


class VanillaClassifier(Classifier):
    """Serial."""

    mode = None


class VanillaLayerNorm(LayerNorm):
    """Serial."""

    mode = None


class VanillaPatchEmbedding(PatchEmbedding):
    """Serial."""

    mode = None
