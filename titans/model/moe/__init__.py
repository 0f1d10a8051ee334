"""Models with experts in the place of MLPs; train them with ``colossalai.nn.loss.MoeLoss``."""

from titans.model.moe.gpt import MOEGPT, prmoe_4b, prmoe_31b
from titans.model.moe.vit import ViTMoE, Widenet

__all__ = ["MOEGPT", "ViTMoE", "Widenet", "prmoe_4b", "prmoe_31b"]
