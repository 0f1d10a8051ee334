"""Random plans: a plugin with its options, a launched config, a precision; and the lines of Python that make
them.
"""

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
class PlanSpec:
    """The plan of a run: its ranks, its plugin with options, and its precision."""

    ranks: int = 1
    plugin: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    engine: bool = False  # by ``colossalai.initialize`` and its config, not by a ``Booster``
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    micro: int = 1  # parts of a batch that go through the pipeline one after another

    @property
    def replicas(self) -> int:
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def least_ranks(self) -> int:
        """The fewest ranks that this plan can run on."""
        return self.tensor * self.pipeline

    @property
    def needed_options(self) -> tuple[str, ...]:
        """Options that say what plan this is, and so are never left out."""
        return ("stage", "device")

    @property
    def name(self) -> str:
        """What the plan is counted under."""
        stage = str(self.options.get("stage", "")) if self.plugin == "zero" else ""
        parts = (
            [f"{self.plugin}{stage}"] + ["tensor"] * (self.tensor > 1) + ["pipeline"] * (self.pipeline > 1)
        )
        return ("engine " if self.engine else "") + " x ".join(parts)

    def describe(self) -> str:
        """The plan in a few words."""
        spread = f" tp{self.tensor}" * (self.tensor > 1)
        if self.pipeline > 1:
            spread += f" pp{self.pipeline} {self.schedule} m{self.micro}"
        return f"{self.name} x{self.ranks}{spread} {self.precision}"

    def config(self, accumulate: int, clip: float | None) -> dict[str, Any]:
        """The config of the launch."""
        parallel: dict[str, Any] = {}
        config: dict[str, Any] = {}
        if self.tensor > 1:
            parallel["tensor"] = {"size": self.tensor, "mode": "1d"}
        if self.pipeline > 1:
            parallel["pipeline"] = {"size": self.pipeline, "schedule": self.schedule}
            config["NUM_MICRO_BATCHES"] = self.micro
            if self.chunks > 1:
                config["NUM_CHUNKS"] = self.chunks
        if parallel:
            config["parallel"] = parallel
        return config | (self._sections(accumulate, clip) if self.engine else {})

    def _sections(self, accumulate: int, clip: float | None) -> dict[str, Any]:
        """What the config asks ``colossalai.initialize`` for."""
        sections: dict[str, Any] = {}
        options = {name: value for name, value in self.options.items() if name not in ("stage", "device")}
        if self.plugin == "zero":
            sections["zero"] = {"level": self.options["stage"], "precision": self.precision, **options}
        elif self.plugin == "gemini":
            sections["zero"] = {"level": 3, "precision": self.precision, **options}
        elif options:
            sections["torch_ddp"] = options
        if accumulate > 1:
            sections["gradient_accumulation"] = accumulate
        if clip is not None:
            sections["clip_grad_norm"] = clip
        return sections

    def plugin_call(self) -> str:
        """The expression that makes the plugin."""
        options = dict(self.options)
        if self.plugin in ("zero", "gemini"):
            options["precision"] = self.precision
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{PLUGINS[self.plugin]}({text})"

    def booster_call(self) -> str:
        """The expression that makes the booster."""
        args = [] if self.plugin == "gemini" else ["device='cpu'"]
        if self.precision != "fp32" and self.plugin not in ("zero", "gemini"):
            # a scale that does not overflow at first: the serial model skips no step
            small = "FP16TorchMixedPrecision(init_scale=64.0)"
            args.append(f"mixed_precision={small if self.precision == 'fp16' else repr(self.precision)}")
        if self.plugin != "none":
            args.append(f"plugin={self.plugin_call()}")
        return f"Booster({', '.join(args)})"


def at_folder(text: str, folder: str = "folder") -> str:
    """Put the expression ``folder`` where options name a place on a disk."""
    return text.replace(repr(_DISK), folder)


# schedule -> chunks on each rank
_SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbh1": 1, "zbv": 2}


def random_plan(r: Random, model: ModelSpec, ranks: list[int], spread: str = "data") -> PlanSpec:
    """Draw a plan that ``model`` may be trained under; ``spread`` is data, tensor or pipeline."""
    plugin = r.choice(["none", "ddp", "ddp", "fsdp", "fsdp", "zero", "zero", "zero", *["gemini"] * 4])
    count = 1 if plugin == "none" else r.choice(ranks)
    precision = r.choices(["fp32", "bf16", "fp16"], [7, 2, 1])[0]
    engine = plugin != "fsdp" and r.random() < 0.25
    if plugin in ("none", "ddp") and precision != "fp32":
        precision = "fp32" if engine else "bf16"  # the scaler of fp16 wants a GPU
    options = {
        "none": _no_options,
        "ddp": _ddp_options,
        "fsdp": _fsdp_options,
        "zero": _zero_options,
        "gemini": _gemini_options,
    }[plugin](r, model)
    plan = PlanSpec(count, plugin, options, precision, engine)
    if engine and plugin == "none":
        plan.engine = r.random() < 0.5
    if spread == "tensor":
        plan.tensor = 2
    if spread == "pipeline":
        plan.pipeline = 2
        plan.schedule = r.choice(sorted(_SCHEDULES))
        plan.chunks = _SCHEDULES[plan.schedule]
        plan.micro = r.choice([2, 4])
        plan.tensor = 2 if model.can_be_cut and r.random() < 0.2 else 1
    if spread != "data":
        least = plan.tensor * plan.pipeline
        most = max(ranks)
        plan.ranks = least
        if 2 * least <= most and r.random() < 0.5 and not (plugin == "none" and spread == "tensor"):
            plan.ranks = 2 * least
    return plan


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
