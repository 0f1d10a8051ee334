"""Plans for ``Booster``, and what one must do to be such a plan; see booster.md on how to write one."""

from colossalai.booster.plugin.base import Plugin
from colossalai.booster.plugin.ddp import TorchDDPPlugin
from colossalai.booster.plugin.dp import DPPluginBase
from colossalai.booster.plugin.fsdp import TorchFSDPPlugin
from colossalai.booster.plugin.gemini import GeminiPlugin
from colossalai.booster.plugin.low_level_zero import LowLevelZeroPlugin

__all__ = [
    "DPPluginBase",
    "GeminiPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
