"""OPT as metaseq stores it (``restored.pt``), with the names and the order that transformers has.

Queries, keys and values lie in one weight there, in the order keys, values, queries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from colossalai.checkpoint_io.runs.data_file import TensorToWrite

_IN_BLOCK = re.compile(
    r"layers\.\d+\.(self_attn\.(qkv_proj|out_proj)|self_attn_layer_norm|fc1|fc2|final_layer_norm)\.(weight|bias)"
)
_OUTSIDE = {
    "embed_tokens.weight": "embed_tokens.weight",
    "embed_positions.weight": "embed_positions.weight",
    "layer_norm.weight": "final_layer_norm.weight",
    "layer_norm.bias": "final_layer_norm.bias",
    "project_in_dim.weight": "project_in.weight",
    "project_out_dim.weight": "project_out.weight",
}
_NOT_A_WEIGHT = "version"
_HEAD = "output_projection.weight"
_PARTS = ("k_proj", "v_proj", "q_proj")


def is_metaseq(names: Iterable[str]) -> bool:
    """Whether these are the names of an OPT of metaseq."""
    return any(re.search(r"(^|\.)decoder\.layers\.\d+\.self_attn\.qkv_proj\.weight$", name) for name in names)


def as_hugging_face(blocks: Sequence[TensorToWrite]) -> list[TensorToWrite]:
    """The same weights for ``OPTForCausalLM``.  A tensor that has no place there is refused with its name."""
    by_name = {block.key.rpartition("decoder.")[2]: block for block in blocks}
    found: list[TensorToWrite] = []
    for name, block in by_name.items():
        if name == _NOT_A_WEIGHT:
            continue
        if name == _HEAD:
            _check_tied(block, by_name["embed_tokens.weight"])
        elif name in _OUTSIDE:
            found.append(_renamed(block, _OUTSIDE[name]))
        elif not _IN_BLOCK.fullmatch(name):
            raise ValueError(
                f"{block.key} has no place in an OPT of transformers; is this a model of metaseq?"
            )
        elif "qkv_proj" in name:
            found += _divided(block, name)
        else:
            found.append(_renamed(block, name))
    return found


def _renamed(block: TensorToWrite, name: str) -> TensorToWrite:
    return TensorToWrite(f"model.decoder.{name}", block.dtype, block.shape, block.read)


def _divided(block: TensorToWrite, name: str) -> list[TensorToWrite]:
    rows, rest = divmod(block.shape[0], 3)
    if rest:
        raise ValueError(f"{block.key} has {block.shape[0]} rows, which are no three equal parts")
    shape = (rows, *block.shape[1:])

    def part(index: int) -> Callable[[], Tensor]:
        return lambda: block.read()[index * rows : (index + 1) * rows].clone()

    return [
        TensorToWrite(f"model.decoder.{name.replace('qkv_proj', kind)}", block.dtype, shape, part(i))
        for i, kind in enumerate(_PARTS)
    ]


def _check_tied(head: TensorToWrite, table: TensorToWrite) -> None:
    if not head.read().equal(table.read()):
        raise ValueError(
            f"{head.key} differs from {table.key}, but OPT of transformers has one weight for both"
        )
