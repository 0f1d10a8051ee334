"""The documented place of ``multi_tensor_applier``."""

from colossalai.utils.common import MultiTensorApply, multi_tensor_applier

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
