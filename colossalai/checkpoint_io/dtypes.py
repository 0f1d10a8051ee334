"""The names that safetensors has for dtypes."""

from __future__ import annotations

import torch

NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_BY_DTYPE = {dtype: name for name, dtype in NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    if dtype not in _BY_DTYPE:
        raise TypeError(
            f"safetensors cannot hold tensors of {dtype}; it knows {', '.join(map(str, _BY_DTYPE))}"
        )
    return _BY_DTYPE[dtype]


def dtype_of(name: str) -> torch.dtype:
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a dtype of safetensors; they are {', '.join(NAMES)}")
    return NAMES[name]
