"""How long LLaMA-3-8B's shape takes from the first line of a script to the end of its first step, on one GPU.

    python -m benchmarks.large_start            # 8.03 B parameters, batch 1 x 1024, bf16, needs 112 GB in all
    python -m benchmarks.large_start --small    # the same code with a toy, also on a CPU

The model of transformers is built without memory and boosted by ``GeminiPlugin(placement_policy="auto")``:
its weights are drawn on the GPU, rest on the host in the first forward and backward pass, and move to the GPU
before the first update, as many as fit beside the activations.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from dataclasses import dataclass, field
from typing import Any

BEGIN = time.perf_counter()  # torch is imported afterwards
LLAMA_3_8B: dict[str, int] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
TOY: dict[str, int] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
BAR = 60.0  # seconds to the end of the first step
STEPS = 3


@dataclass
class Report:
    """What a start took: seconds by phase, and bytes."""

    phases: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    parameters: int = 0
    on_device: int = 0
    """Parameters that rest on the device after the first step."""
    last: float = BEGIN

    def done(self, phase: str) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.phases[phase], self.last = now - self.last, now

    @property
    def start(self) -> float:
        """Seconds to the end of the first step."""
        return sum(seconds for phase, seconds in self.phases.items() if not phase.startswith("later"))

    def __str__(self) -> str:
        import torch

        lines = [f"{phase:28}{seconds:8.2f} s" for phase, seconds in self.phases.items()]
        lines.append(f"{'start':28}{self.start:8.2f} s, of at most {BAR:.0f}")
        lines.append(f"{self.on_device:,} of {self.parameters:,} parameters rest on the device")
        if torch.cuda.is_available():
            # Gemini begins to count peaks anew while it measures the first step; what was reserved stays so
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
            lines.append(f"GPU: {allocated:,} bytes at most after the first step, {reserved:,} reserved")
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        lines.append(f"host: {host:,} bytes at most")
        lines.append(f"losses: {', '.join(f'{loss:.4f}' for loss in self.losses)}")
        return "\n".join(lines)


def run(sizes: dict[str, int], length: int, batch: int = 1) -> Report:
    """Build, boost and train a LLaMA of ``sizes`` for a few steps."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.launchers import launch
    from colossalai.lazy import LazyInitContext
    from colossalai.nn.optimizer import HybridAdam
    from colossalai.testing import free_port

    report = Report()
    launch({}, rank=0, world_size=1, host="127.0.0.1", port=free_port(), verbose=False)
    plugin = GeminiPlugin(placement_policy="auto", precision="bf16")
    report.done("import, launch")
    config = LlamaConfig(**sizes, max_position_embeddings=length, use_cache=False)
    torch.manual_seed(0)
    with LazyInitContext(default_device=plugin.device):
        model = LlamaForCausalLM(config)
    report.parameters = sum(p.numel() for p in model.parameters())
    report.done("build without memory")
    booster = Booster(plugin=plugin)
    boosted: Any
    boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-5))
    report.done("boost")
    ids = torch.randint(sizes["vocab_size"], (batch, length), device=plugin.device)
    for step in range(STEPS):
        loss = boosted(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        boosted.settle()  # updates on the host are a part of the step
        report.losses.append(loss.item())
        report.done(f"later step {step + 1}" if step else "first step")
    tiers = boosted.chunk_manager
    report.on_device = sum(s.numel for c in tiers.chunks if c.home is tiers.compute for s in c.slots)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a toy, to try the code on a CPU")
    parser.add_argument("--length", type=int, help="of a sequence; by default 1024, or 16 for the toy")
    parser.add_argument("--layers", type=int, help="fewer blocks than the model has")
    args = parser.parse_args()
    chosen = dict(TOY if args.small else LLAMA_3_8B)
    if args.layers:
        chosen["num_hidden_layers"] = args.layers
    print(run(chosen, args.length or (16 if args.small else 1024)), flush=True)
