"""Mixed precision by the names that config files use."""

from colossalai.amp.amp_type import AMP_TYPE

__all__ = ["AMP_TYPE"]
