"""Activation checkpointing under a budget in bytes."""

from colossalai.auto_parallel.checkpoint.auto import CheckpointPlanner, auto_checkpoint
from colossalai.auto_parallel.checkpoint.plan import CheckpointPlan, CurvePoint, plot_curve

__all__ = ["CheckpointPlan", "CheckpointPlanner", "CurvePoint", "auto_checkpoint", "plot_curve"]
