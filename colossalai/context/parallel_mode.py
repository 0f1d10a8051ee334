"""``ParallelMode``: the documented names of the process groups that a rank belongs to."""

from __future__ import annotations

from enum import Enum


class ParallelMode(Enum):
    """A kind of process group.  ``register`` adds a kind of your own at run time."""

    GLOBAL = "global"
    DATA = "data"
    # the ranks that hold one copy of the model together: pipeline stages x tensor parts
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    SEQUENCE_DP = "sequence_dp"
    # the ranks that share the experts out, and those that hold the same ones
    MOE_MODEL = "moe_model"
    MOE_DATA = "moe_data"
    # the first and the last stage of a pipeline, which may share one table
    EMBEDDING = "embedding"
    PARALLEL_1D = "1d"
    # a ROW group holds the ranks of one row, so the rank inside it is the column index; COL the other way
    # round
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"
    PARALLEL_3D_INPUT_X_WEIGHT = "3d_input_x_weight"
    PARALLEL_3D_OUTPUT_X_WEIGHT = "3d_output_x_weight"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_2P5D_XZ = "2p5d_xz"

    @classmethod
    def register(cls, name: str, value: str) -> ParallelMode:
        """Add the member ``name`` and return it; registering the same pair again returns the same member.

        Call it on every rank, before ``colossalai.launch``.
        """
        if not isinstance(name, str) or not (name.isidentifier() and name.isupper()) or name.startswith("_"):
            raise ValueError(f"a parallel mode needs a name in capitals such as NEW_MODE, got {name!r}")
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"the value of ParallelMode.{name} must be a string such as 'new_mode', got {value!r}"
            )
        known = cls._member_map_.get(name)
        if known is not None and known.value == value:
            return cls[name]
        taken = known or cls._value2member_map_.get(value)
        if taken is not None:
            raise ValueError(
                f"ParallelMode.{name} = {value!r} would clash with {taken}; choose another name and value"
            )
        # Enum has no public way to grow, so this fills the same tables that the class statement fills.
        member = object.__new__(cls)
        member._name_ = name
        member._value_ = value
        vars(member).update(_sort_order_=len(cls._member_names_), __objclass__=cls)
        type.__setattr__(cls, name, member)
        cls._member_names_.append(name)
        cls._member_map_[name] = member
        cls._value2member_map_[value] = member
        return member
