"""Page 10 of the documentation: Hugging Face GPT-2 made Megatron-parallel by one spec per parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from colossalai.tensor import (
    ColoInitContext,
    ColoParameter,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from colossalai.testing.parity import PlacedRun, Problem

VOCABULARY, SEQUENCE = 37, 8  # the vocabulary is odd on purpose: the page never cuts it


class GPTLMModel(nn.Module):
    def __init__(
        self,
        hidden_size: int = 16,
        num_layers: int = 2,
        num_attention_heads: int = 4,
        max_seq_len: int = 16,
        vocab_size: int = VOCABULARY,
        checkpoint: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.checkpoint = checkpoint
        self.model = GPT2LMHeadModel(
            GPT2Config(
                n_embd=hidden_size,
                n_layer=num_layers,
                n_head=num_attention_heads,
                n_positions=max_seq_len,
                n_ctx=max_seq_len,
                vocab_size=vocab_size,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        if checkpoint:
            self.model.gradient_checkpointing_enable()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        # Only return lm_logits
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=not self.checkpoint)[
            0
        ]


class GPTLMLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        # Flatten the tokens
        return self.loss_fn(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))


def split_param_single_dim_tp1d(dim: int, param: ColoParameter, pg: ProcessGroup) -> None:
    spec = (ShardSpec([dim], [pg.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))
    if param.process_group.tp_world_size() == 1:
        param.set_process_group(pg)
    param.set_tensor_spec(*spec)


def split_param_row_tp1d(param: ColoParameter, pg: ProcessGroup) -> None:
    split_param_single_dim_tp1d(0, param, pg)


def split_param_col_tp1d(param: ColoParameter, pg: ProcessGroup) -> None:
    split_param_single_dim_tp1d(-1, param, pg)


def megatron(model: nn.Module, pg: ProcessGroup) -> None:
    """The loop of page 10."""
    for mn, module in model.named_modules():
        for pn, param in module.named_parameters(recurse=False):
            # set process group for all parameters
            param.set_process_group(pg)
            if "mlp.c_fc" in mn:
                if "weight" in pn or "bias" in pn:
                    split_param_col_tp1d(param, pg)  # column slice
                    # keep the shape of the output from c_fc
                    param.compute_spec.set_output_replicate(False)
            elif "mlp.c_proj" in mn:
                if "weight" in pn:
                    split_param_row_tp1d(param, pg)  # row slice
            elif "wte" in mn or "wpe" in mn or "c_attn" in mn or "c_proj" in mn:
                split_param_col_tp1d(param, pg)  # column slice


def tensor_parallelize(model: nn.Module, pg: ProcessGroup) -> None:
    """The loop of page 42, for parameters that may begin their lives cut."""
    for mn, module in model.named_modules():
        for pn, param in module.named_parameters(recurse=False):
            if hasattr(param, "visited"):
                continue
            param.set_dist_spec(ReplicaSpec())
            if "mlp.c_fc" in mn:
                split_param_col_tp1d(param, pg)
                param.compute_spec.set_output_replicate(False)
            elif "mlp.c_proj" in mn:
                if "weight" in pn:
                    split_param_row_tp1d(param, pg)
            elif "wte" in mn or "wpe" in mn or "c_attn" in mn or "c_proj" in mn:
                split_param_col_tp1d(param, pg)
            param.visited = True


def build(device: str = "cpu", **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return GPTLMModel(**sizes).to(device)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    torch.manual_seed(2)  # dropout
    return GPTLMLoss()(model(ids, torch.ones_like(ids)), ids)


def problem(device: str = "cpu", **sizes: Any) -> Problem:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (4, SEQUENCE), generator=generator).to(device) for _ in range(3)]
    return Problem(build=lambda: build(device, **sizes), batches=batches, loss=loss)


class ColoRun(PlacedRun):
    """``PlacedRun`` with copies on the dp ranks: each takes its part of the batch, and gradients are averaged."""

    def __init__(self, problem: Problem, model: nn.Module, pg: ProcessGroup) -> None:
        super().__init__(problem, model, pg.mesh, problem.loss)
        self.pg = pg

    def forward_backward(self, batch: Tensor) -> Tensor:
        own = batch.chunk(self.pg.dp_world_size())[self.pg.dp_local_rank()]
        loss = super().forward_backward(own)
        for value in [loss, *(p.grad for p in self.model.parameters() if p.grad is not None)]:
            dist.all_reduce(value, group=self.pg.dp_process_group())
            value /= self.pg.dp_world_size()
        return loss


def page_10(problem: Problem, tp: int, device: str = "cpu") -> ColoRun:
    with ColoInitContext(device=torch.device(device)):
        model = problem.build()
    pg = ProcessGroup(tp_degree=tp)
    megatron(model, pg)
    return ColoRun(problem, model, pg)


def page_42(problem: Problem, tp: int) -> ColoRun:
    pg = ProcessGroup(tp_degree=tp)
    with ColoInitContext(device="cpu", default_dist_spec=ShardSpec([-1], [tp]), default_pg=pg):
        model = problem.build()
    tensor_parallelize(model, pg)
    return ColoRun(problem, model, pg)
