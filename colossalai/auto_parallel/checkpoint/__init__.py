"""Activation checkpointing under a budget in bytes."""

from colossalai.auto_parallel.checkpoint.auto import auto_checkpoint
from colossalai.auto_parallel.checkpoint.chen import CheckpointSolverChen
from colossalai.auto_parallel.checkpoint.mode_solver import ModeCost, ModeProblem, ModeStage, solve_modes
from colossalai.auto_parallel.checkpoint.operation import (
    Backward,
    Chain,
    DiscardMemory,
    Forward,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Forwards,
    Loss,
    ReadMemory,
    Sequence,
    WriteMemory,
)
from colossalai.auto_parallel.checkpoint.plan import CheckpointPlan, CurvePoint, plot_curve
from colossalai.auto_parallel.checkpoint.planner import CheckpointPlanner
from colossalai.auto_parallel.checkpoint.rotor import CheckpointSolverRotor
from colossalai.auto_parallel.checkpoint.share import ModelShare
from colossalai.auto_parallel.checkpoint.solver_base import CheckpointSolverBase
from colossalai.auto_parallel.checkpoint.timeline import Arguments

__all__ = [
    "Arguments",
    "Backward",
    "Chain",
    "CheckpointPlan",
    "CheckpointPlanner",
    "CheckpointSolverBase",
    "CheckpointSolverChen",
    "CheckpointSolverRotor",
    "CurvePoint",
    "DiscardMemory",
    "Forward",
    "ForwardCheck",
    "ForwardEnable",
    "ForwardNograd",
    "Forwards",
    "Loss",
    "ModeCost",
    "ModeProblem",
    "ModeStage",
    "ModelShare",
    "ReadMemory",
    "Sequence",
    "WriteMemory",
    "auto_checkpoint",
    "plot_curve",
    "solve_modes",
]
