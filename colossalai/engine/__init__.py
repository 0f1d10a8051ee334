"""The engine: a training script's model, optimizer and criterion with the features of a config inside."""

from colossalai.engine.engine import Engine
from colossalai.engine.gradient_handler import BaseGradientHandler
from colossalai.engine.ophooks import BaseOpHook

__all__ = ["BaseGradientHandler", "BaseOpHook", "Engine"]
