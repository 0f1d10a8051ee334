"""The registries that configurations are read with; users add their own classes to them."""

from __future__ import annotations

from colossalai.registry.registry import Registry

LAYERS = Registry("layers", third_party_library=["torch.nn"])
LOSSES = Registry("losses", third_party_library=["torch.nn"])
MODELS = Registry("models", third_party_library=["torchvision.models"])
OPTIMIZERS = Registry("optimizers", third_party_library=["torch.optim"])
LR_SCHEDULERS = Registry("lr_schedulers", third_party_library=["torch.optim.lr_scheduler"])
DATASETS = Registry("datasets", third_party_library=["torchvision.datasets"])
TRANSFORMS = Registry("transforms", third_party_library=["torchvision.transforms"])
DATA_SAMPLERS = Registry("data_samplers", third_party_library=["torch.utils.data"])
DIST_GROUP_INITIALIZER = Registry("dist_group_initializer")
GRADIENT_HANDLER = Registry("gradient_handler")
HOOKS = Registry("hooks")
OPHOOKS = Registry("ophooks")
SCHEDULE = Registry("schedule")

__all__ = [
    "DATASETS",
    "DATA_SAMPLERS",
    "DIST_GROUP_INITIALIZER",
    "GRADIENT_HANDLER",
    "HOOKS",
    "LAYERS",
    "LOSSES",
    "LR_SCHEDULERS",
    "MODELS",
    "OPHOOKS",
    "OPTIMIZERS",
    "SCHEDULE",
    "TRANSFORMS",
    "Registry",
]
