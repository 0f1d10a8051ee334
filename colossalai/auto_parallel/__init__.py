"""Plans that are found, not written: which activations are kept, and which are computed again."""

from colossalai.auto_parallel.checkpoint import CheckpointPlan, CheckpointPlanner, auto_checkpoint

__all__ = ["CheckpointPlan", "CheckpointPlanner", "auto_checkpoint"]
