"""The table of block kernels: torch still has the functions it calls, and each kernel is right."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention import _ours, check_kernels, kernel_cases
from colossalai.nn.attention.kernels import find_kernel
from colossalai.testing import spawn

Q_K_V = ["query", "key", "value"]
RESULTS = ["out", "logsumexp"]
LENGTHS = ["cum_seq_q", "cum_seq_k", "max_q", "max_k"]
# what the table passes by place, in the order of the schema
PLACES = {
    "flash_attention_for_cpu": [*Q_K_V, "dropout_p", "is_causal"],
    "flash_attention_for_cpu_backward": ["grad_out", *Q_K_V, *RESULTS, "dropout_p", "is_causal"],
    "cudnn_attention": [*Q_K_V, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"],
    "cudnn_attention_backward": [
        *("grad_out", *Q_K_V, *RESULTS, "philox_seed", "philox_offset", "attn_bias"),
        *(*LENGTHS, "dropout_p", "is_causal"),
    ],
    "flash_attention": [*Q_K_V, "dropout_p", "is_causal"],
    "flash_attention_backward": [
        *("grad_out", *Q_K_V, *RESULTS, *LENGTHS, "dropout_p", "is_causal", "philox_seed", "philox_offset")
    ],
    "efficient_attention": [*Q_K_V, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"],
    "efficient_attention_backward": [
        *("grad_out_", *Q_K_V, "attn_bias", *RESULTS, "philox_seed", "philox_offset"),
        *("dropout_p", "grad_input_mask", "is_causal"),
    ],
}


@pytest.mark.parametrize("name", PLACES)
def test_torch_has_what_the_table_calls(name: str) -> None:
    arguments = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default._schema.arguments
    names = [a.name for a in arguments]
    assert names[: len(PLACES[name])] == PLACES[name]
    rest = {a.name for a in arguments[len(PLACES[name]) :] if not a.has_default_value()}
    assert not rest, "arguments without a default that the table does not pass"
    assert {a.name for a in arguments if a.kwarg_only} >= {"scale"}


CPU_CASES = [case for case in kernel_cases("cpu") if "float16" in case[0] or "plain" in case[0]][::9]


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case[0])
def test_kernels_of_the_cpu(case: tuple) -> None:
    assert all(error < 32 for error in case[1]().values())


def test_what_has_no_kernel_is_computed_plainly() -> None:
    q = torch.ones(1, 1, 4, 8, dtype=torch.float64)
    assert find_kernel(q, q, q, None, True) is not None
    assert find_kernel(q, q, q[..., :4], None, True) is None


@pytest.mark.gpu
def test_kernels_of_the_gpu() -> None:
    assert check_kernels("cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3])
def test_gloo_ranks_that_share_a_gpu(size: int) -> None:
    for _, off in spawn(_ours, size, length=768):
        assert off < 0.02
