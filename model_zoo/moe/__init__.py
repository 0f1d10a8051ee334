"""Models with experts."""

from model_zoo.moe.models import ViTMoE, Widenet

__all__ = ["ViTMoE", "Widenet"]
