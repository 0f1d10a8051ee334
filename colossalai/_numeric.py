"""Small facts about numbers that every layer may import: rounding up, the dtypes of half precision and of
autocast.
"""

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)


def ceil_div(number: int, parts: int) -> int:
    """Divide ``number`` by ``parts`` and round up."""
    return -(-number // parts)


def round_up(number: int, unit: int) -> int:
    """Round ``number`` up to a multiple of ``unit``."""
    return ceil_div(number, unit) * unit


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on ``device``, or None outside of it; for the meta device, that of the CPU (see
    ``colossalai.utils.meta_autocast``).
    """
    kind = "cpu" if device.type == "meta" else device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
