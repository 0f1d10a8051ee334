"""Mixed precision: what each mode does to a model, an optimizer and a criterion.

The modes are made of few pieces: ``autocast`` and ``casting`` (how a model is called), ``master_weights``,
``scaled_optimizer`` (scaled losses, skipped steps), ``groups`` (who decides together), the loss scales in
``naive_amp.grad_scaler`` and ``torch_amp.GradScaler``.  The booster's precisions are fronts of the same
pieces.
"""

from colossalai.amp.amp_type import AMP_TYPE
from colossalai.amp.convert import (
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
)

__all__ = [
    "AMP_TYPE",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
]
