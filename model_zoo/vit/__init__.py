"""The vision transformer."""

from titans.model.vit import VisionTransformer

__all__ = ["VisionTransformer"]
