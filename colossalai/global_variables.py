"""The tensor-parallel plan of this process, as the documented variable ``tensor_parallel_env``.

``launch`` fills it from the config; it is a plain record that nothing below the documented layer names reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
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


tensor_parallel_env = TensorParallelEnv()
