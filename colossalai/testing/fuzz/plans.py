"""Random plans: a plugin with its options, a launched config, a precision; and the lines of Python that make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from colossalai.testing.fuzz.models import ModelSpec

PLUGINS = {
    "ddp": "TorchDDPPlugin",
    "fsdp": "TorchFSDPPlugin",
    "zero": "LowLevelZeroPlugin",
    "gemini": "GeminiPlugin",
}
_DISK = "__DISK__"  # stands for a scratch folder in the options of a plugin


@dataclass
class Plan:
    """How a run is spread: over how many ranks, by which plugin with which options, in which precision."""

    ranks: int = 1
    plugin: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"

    @property
    def replicas(self) -> int:
        return self.ranks

    @property
    def least_ranks(self) -> int:
        """The fewest ranks that this plan can run on."""
        return 1

    @property
    def needed_options(self) -> tuple[str, ...]:
        """Options that say what plan this is, and so are never left out."""
        return ("stage", "device")

    @property
    def name(self) -> str:
        """What the plan is counted under."""
        stage = str(self.options.get("stage", "")) if self.plugin == "zero" else ""
        return f"{self.plugin}{stage}"

    def plugin_call(self, folder: str = "folder") -> str:
        """The expression that makes the plugin."""
        options = dict(self.options)
        if self.plugin in ("zero", "gemini"):
            options["precision"] = self.precision
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{PLUGINS[self.plugin]}({text})".replace(repr(_DISK), folder)

    def booster_call(self) -> str:
        """The expression that makes the booster."""
        args = [] if self.plugin == "gemini" else ["device='cpu'"]
        if self.precision != "fp32" and self.plugin not in ("zero", "gemini"):
            args.append(f"mixed_precision={self.precision!r}")
        if self.plugin != "none":
            args.append(f"plugin={self.plugin_call()}")
        return f"Booster({', '.join(args)})"


def random_plan(r: Random, model: ModelSpec, ranks: list[int]) -> Plan:
    """Draw a plan that ``model`` may be trained under."""
    plugin = r.choice(["none", "ddp", "ddp", "fsdp", "fsdp", "zero", "zero", "zero", *["gemini"] * 4])
    count = 1 if plugin == "none" else r.choice(ranks)
    precision = r.choices(["fp32", "bf16", "fp16"], [7, 2, 1])[0]
    if plugin in ("none", "ddp") and precision != "fp32":
        precision = "bf16"  # the scaler of fp16 wants a GPU
    options = {
        "none": _no_options,
        "ddp": _ddp_options,
        "fsdp": _fsdp_options,
        "zero": _zero_options,
        "gemini": _gemini_options,
    }[plugin](r, model)
    return Plan(count, plugin, options, precision)


def _no_options(r: Random, model: ModelSpec) -> dict[str, Any]:
    return {}


def _ddp_options(r: Random, model: ModelSpec) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if model.leaves_unused or r.random() < 0.2:
        options["find_unused_parameters"] = True
    if r.random() < 0.3:
        options["gradient_as_bucket_view"] = True
    if r.random() < 0.3:
        options["bucket_cap_mb"] = 0.0001
    if r.random() < 0.2:
        options["broadcast_buffers"] = False
    return options


def _fsdp_options(r: Random, model: ModelSpec) -> dict[str, Any]:
    return {"sync_module_states": True} if r.random() < 0.3 else {}


def _zero_options(r: Random, model: ModelSpec) -> dict[str, Any]:
    options: dict[str, Any] = {"stage": r.choice([1, 2]), "initial_scale": 64}
    if r.random() < 0.4:
        options["cpu_offload"] = True
    if r.random() < 0.3:
        options["overlap_communication"] = False
    if r.random() < 0.4:
        options["reduce_bucket_size_in_m"] = 0.00005
    return options


def _gemini_options(r: Random, model: ModelSpec) -> dict[str, Any]:
    options: dict[str, Any] = {
        "device": "cpu",
        "placement_policy": r.choice(["cpu", "cpu", "auto", "cuda"]),
        "initial_scale": 64,
    }
    if r.random() < 0.7:
        options["min_chunk_size_mb"] = options["search_range_mb"] = r.choice([0.0002, 0.0005, 0.002])
    if r.random() < 0.2:
        options["strict_ddp_mode"] = True
    if r.random() < 0.2:
        options["update_in_backward"] = True
    if r.random() < 0.2:
        options["pin_memory"] = False
    if r.random() < 0.2:
        options["prefetch"] = r.choice([0, 1, 5])
    if r.random() < 0.15:
        options |= {"host_capacity": r.choice([20_000, 40_000, 80_000]), "disk_dir": _DISK}
    if r.random() < 0.15:
        options["compute_capacity"] = r.choice([5_000, 20_000, 80_000])
    if r.random() < 0.1:
        options["host_buffers"] = r.choice([1, 2])
    if r.random() < 0.1:
        options["force_outputs_fp32"] = True
    return options
