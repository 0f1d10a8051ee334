"""torch's autocast and gradient scaler, for models that are spread over ranks too."""

from colossalai.amp.torch_amp._grad_scaler import GradScaler
from colossalai.amp.torch_amp.torch_amp import TorchAMPLoss, TorchAMPModel, TorchAMPOptimizer

__all__ = ["GradScaler", "TorchAMPLoss", "TorchAMPModel", "TorchAMPOptimizer"]
