"""A step on the meta device needs the bytes that autocast on a GPU needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.utils import checkpoint
from colossalai.utils.meta import MetaBytes, gpu_kernels
from colossalai.utils.meta_autocast import _AS_IT_IS, _FP32, _WIDEST, _operations

ROWS, WIDTH = 1024, 256
HALF, WEIGHT = 2 * ROWS * WIDTH, 4 * WIDTH * WIDTH  # of activations in bf16, of a weight in fp32


def test_rules_name_operations_of_torch() -> None:
    treated = {operation.overloadpacket.__name__ for operation in _operations()}
    older = {"rms_norm"} if torch.__version__ < (2, 13) else set()  # which torch 2.11 does not treat
    assert treated | older >= {*_FP32, *_WIDEST, *_AS_IT_IS}
    # what has no rule is a product, or a cell of a recurrent network, which consists of products
    words = (
        "mm",
        "mul",
        "mv",
        "conv",
        "linear",
        "cell",
        "einsum",
        "dot",
        "addr",
        "prelu",
        "attention",
        "cudnn_rnn",
    )
    others = treated - {*_FP32, *_WIDEST, *_AS_IT_IS}
    assert not [name for name in others if not any(word in name for word in words)]


def test_dtypes_are_those_of_autocast() -> None:
    x = torch.empty(8, 16, device="meta")
    linear = nn.Linear(16, 4, device="meta")
    with gpu_kernels():
        with torch.autocast("cuda", torch.bfloat16):
            y = linear(x)
            assert y.dtype == torch.bfloat16
            assert F.softmax(y, 1).dtype == F.layer_norm(y, (4,)).dtype == torch.float32
            assert torch.addcmul(y, y, y.float()).dtype == torch.float32
            with torch.autocast("meta", enabled=False):
                assert linear(x).dtype == torch.float32
        assert linear(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):  # nothing is left behind
        assert linear(x).dtype == torch.float32


ON_CPU: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, half: F.linear(x, x),
    lambda x, half: half.softmax(1),
    lambda x, half: F.layer_norm(half, (8,)),
    lambda x, half: half.exp().sum(),
    lambda x, half: torch.cat([half, x]),
    lambda x, half: torch.stack([half, half]),
    lambda x, half: F.cross_entropy(half, x),
    lambda x, half: F.mse_loss(half, half),
    lambda x, half: torch.einsum("ij,jk->ik", x, x),
    lambda x, half: torch.addcmul(half, half, half),
    lambda x, half: torch.fft.rfft(half),
    lambda x, half: F.group_norm(half, 2, x[0], x[0]),
    lambda x, half: F.binary_cross_entropy(half.sigmoid(), half.sigmoid()),
    lambda x, half: x.double() @ x.double(),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_the_cpu_are_those_of_its_autocast(dtype: torch.dtype) -> None:
    found = []
    for device in ("cpu", "meta"):
        with gpu_kernels(is_cpu=True), torch.autocast("cpu", dtype):
            x = torch.ones(8, 8, device=device)
            found.append([operation(x, x.to(dtype)).dtype for operation in ON_CPU])
    assert found[0] == found[1]


def bytes_after_forward(recomputed: bool) -> tuple[int, int]:
    """Alive after two products with one weight under autocast, and after the block."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
    with gpu_kernels(), MetaBytes() as memory:
        memory.hold(linear.parameters())
        x = torch.empty(ROWS, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):

            def twice(x: torch.Tensor) -> torch.Tensor:
                return linear(linear(x))

            y = checkpoint(twice, False, x, use_reentrant=False) if recomputed else twice(x)
            inside = memory.now
        outside = memory.now
        y.sum().backward()
        assert linear.weight.grad is not None
        assert linear.weight.grad.dtype == torch.float32
        assert x.grad is not None
        assert x.grad.dtype == torch.bfloat16
    return inside, outside


def test_one_cast_of_a_weight_is_kept_until_the_block_ends() -> None:
    kept = WEIGHT + 3 * HALF  # two inputs and the output
    assert bytes_after_forward(False) == (kept + WEIGHT // 2, kept + WEIGHT // 2)  # autograd keeps the cast
    kept -= HALF
    assert bytes_after_forward(True) == (kept + WEIGHT // 2, kept)
