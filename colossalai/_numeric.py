"""Small facts about numbers that every layer may import: rounding up, and the dtypes of half precision."""

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)


def ceil_div(number: int, parts: int) -> int:
    """Divide ``number`` by ``parts`` and round up."""
    return -(-number // parts)


def round_up(number: int, unit: int) -> int:
    """Round ``number`` up to a multiple of ``unit``."""
    return ceil_div(number, unit) * unit
