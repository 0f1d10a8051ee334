"""The plan of this process, as the documented variables ``tensor_parallel_env`` and ``moe_env``.

``launch`` fills them from the config; they are plain records that nothing below the documented layer names
reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colossalai.context import ParallelMode


@dataclass
class TensorParallelEnv:
    """The mode, its sizes, and (in 3D) the parallel mode along which each operand is cut."""

    mode: str | None = None
    vocab_parallel: bool = False
    parallel_input_1d: bool = False
    summa_dim: int | None = None
    tesseract_dim: int | None = None
    tesseract_dep: int | None = None
    depth_3d: int | None = None
    input_group_3d: ParallelMode | None = None
    weight_group_3d: ParallelMode | None = None
    output_group_3d: ParallelMode | None = None
    input_x_weight_group_3d: ParallelMode | None = None
    output_x_weight_group_3d: ParallelMode | None = None

    def load(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of the constructor; a field that is not named goes back to its default."""
        fresh = TensorParallelEnv(*args, **kwargs)
        for field in fields(self):
            setattr(self, field.name, getattr(fresh, field.name))

    def save(self) -> dict[str, Any]:
        """All fields as a dict; ``load(**saved)`` brings them back."""
        return asdict(self)


@dataclass
class MoeEnv:
    """Over how many ranks experts are shared out, how many sets of such ranks there are, and the loss that
    balances the routers.
    """

    data_parallel_size: int = 1
    model_parallel_size: int = 1

    def setup(self, moe_model_size: int = 1, data_parallel_size: int = 1) -> None:
        """Note the sizes; ``launch`` does so."""
        self.model_parallel_size, self.data_parallel_size = moe_model_size, data_parallel_size

    @property
    def aux_loss(self) -> Any:
        """The sum of the losses of the routers in the last forward pass; 0.0 if there are none."""
        return _moe_context().get_loss()

    def add_loss(self, loss: Any) -> None:
        _moe_context().add_loss(loss)

    def get_loss(self) -> Any:
        return self.aux_loss

    def reset_loss(self) -> None:
        _moe_context().reset_loss()

    def is_initialized(self) -> bool:
        """Whether the launched config shares experts out."""
        return self.model_parallel_size > 1


def _moe_context() -> Any:
    # by its name: this module lies below it
    return import_module("colossalai.context.moe_context").MOE_CONTEXT


tensor_parallel_env = TensorParallelEnv()
moe_env = MoeEnv()
