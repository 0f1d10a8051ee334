"""The section ``zero`` of a config where it means ZeRO-3: Gemini, whose options can be written in
three ways.

``zero = dict(model_config=dict(tensor_placement_policy="cpu", ...), optimizer_config=dict(initial_scale=2**5,
...))``; ``zero = dict(level=3, offload_optimizer_config=dict(device="nvme", nvme_path="..."),
offload_param_config=dict(device="cpu"))``; or ``zero = dict(level=3, placement_policy="cpu", ...)`` with the
plugin's own names.

With ``offload_param_config=dict(device="nvme", nvme_path="...")`` the disk is the third tier, for weights,
gradients and states beyond ``host_capacity``, which the section must then have.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from colossalai.amp.loss_scale import LOSS_SCALE, fix_loss_scale
from colossalai.booster.plugin import GeminiPlugin
from colossalai.context.config import ConfigException
from colossalai.nn.optimizer import NVMeOptimizer

# The documents' names, by that of the plugin; an empty one is accepted and does nothing.
OWN = {
    "clip_grad": "max_norm",
    "overlap_comm": "",
}
MODEL = {
    "tensor_placement_policy": "placement_policy",
    "shard_strategy": "",
    "reuse_fp16_shard": "",
    "reduce_scatter_bucket_size_mb": "",
    "gradient_predivide_factor": "",
}
OPTIMIZER = {"clipping_norm": "max_norm"}
SUBSECTIONS = (
    "model_config",
    "optimizer_config",
    "offload_optimizer_config",
    "offload_param_config",
    "aio_config",
)

OFFLOAD_OPTIMIZER = (
    "device",
    "nvme_path",
    "pin_memory",
    "buffer_count",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
)
OFFLOAD_PARAM = ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu")
AIO = ("block_size", "queue_depth", "thread_count", "single_submit", "overlap_events")

OF_OPTIMIZER = (
    "gpu_margin_mem_ratio",
    *LOSS_SCALE,
    "max_norm",
    "norm_type",
    "update_in_backward",
    "undo_ratio",
)


class GeminiSection(NamedTuple):
    """The options of a plugin, and the folder on a disk for optimizer states, if these alone go there."""

    options: dict[str, Any]
    nvme_path: str | None = None


def means_gemini(section: Mapping[str, Any]) -> bool:
    """Whether a section asks for ZeRO-3."""
    level = section.get("level")
    return level == 3 or (level is None and any(name in section for name in SUBSECTIONS))


def read_gemini(section: Mapping[str, Any]) -> GeminiSection:
    """Check ``section`` and translate it."""
    plugin = list(inspect.signature(GeminiPlugin).parameters)
    model = [name for name in plugin if name not in OF_OPTIMIZER]
    _known("zero", section, ["level", "dynamic_loss_scale", "cpu_offload", *OWN, *SUBSECTIONS, *plugin])
    model_config, optimizer_config, *_ = (_subsection(section, name) for name in SUBSECTIONS)
    _known("zero.model_config", model_config, [*MODEL, *model])
    _known("zero.optimizer_config", optimizer_config, [*OPTIMIZER, *OF_OPTIMIZER, "verbose"])
    plain = {name: value for name, value in section.items() if name in plugin or name in OWN}
    options = _merge((plain, OWN), (model_config, MODEL), (optimizer_config, OPTIMIZER))
    if not section.get("dynamic_loss_scale", True):
        fix_loss_scale(options)
    policy, path = _places(section)
    if (folder := _folder_of_weights(section, options)) is not None:
        options["disk_dir"], path = folder, None  # the tier takes states too
    if policy is not None and options.setdefault("placement_policy", policy) != policy:
        raise ConfigException(
            "config section 'zero' lets weights or states rest away from the device, which is placement"
            f" policy {policy!r}, and also asks for {options['placement_policy']!r}; keep one"
        )
    return GeminiSection(options, path)


def send_to_disk(optimizer: Optimizer, path: str) -> None:
    """Let the states of ``optimizer`` rest in ``path``."""
    if not isinstance(optimizer, NVMeOptimizer):
        raise ConfigException(
            "config section 'zero' has offload_optimizer_config with device='nvme', which CPUAdam and"
            f" HybridAdam can do, got {type(optimizer).__name__}"
        )
    optimizer.offload_states(1.0, path)


def _known(where: str, section: Mapping[str, Any], names: Iterable[str]) -> None:
    names = list(names)
    for name in section:
        if name not in names:
            raise ConfigException(
                f"config section '{where}' does not know {name!r}; it takes {', '.join(names)}"
            )


def _subsection(section: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = section.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigException(f"config section 'zero' needs {name} as a dict, got {found!r}")
    return found


def _merge(*parts: tuple[Mapping[str, Any], Mapping[str, str]]) -> dict[str, Any]:
    """All options under the plugin's names; one that two parts give differently is refused."""
    options: dict[str, Any] = {}
    for part, names in parts:
        for name, value in part.items():
            to = names.get(name, name)
            if to and options.setdefault(to, value) != value:
                raise ConfigException(
                    f"config section 'zero' has {to} twice, as {options[to]!r} and as {name}={value!r}; keep"
                    " one"
                )
    return options


def _places(section: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The placement policy that offload sections mean, and the folder of optimizer states."""
    states = _subsection(section, "offload_optimizer_config")
    weights = _subsection(section, "offload_param_config")
    _known("zero.offload_optimizer_config", states, OFFLOAD_OPTIMIZER)
    _known("zero.offload_param_config", weights, OFFLOAD_PARAM)
    _known("zero.aio_config", _subsection(section, "aio_config"), AIO)
    places = {_device("offload_optimizer_config", states), _device("offload_param_config", weights)}
    if section.get("cpu_offload"):
        places.add("cpu")
    on_disk = _device("offload_optimizer_config", states) == "nvme"
    path = states.get("nvme_path") if on_disk else None
    if path is None and on_disk:
        raise ConfigException(
            "config section 'zero' has offload_optimizer_config with device='nvme' and needs nvme_path, a"
            " folder of a local disk"
        )
    return ("cpu" if places & {"cpu", "nvme"} else None), None if path is None else str(path)


def _folder_of_weights(section: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """The folder for the disk tier, if weights may go there."""
    weights = _subsection(section, "offload_param_config")
    states = _subsection(section, "offload_optimizer_config")
    if _device("offload_param_config", weights) != "nvme":
        return None
    folder = weights.get("nvme_path")
    if folder is None or options.get("host_capacity") is None:
        raise ConfigException(
            "config section 'zero' has offload_param_config with device='nvme' and needs two things:"
            " nvme_path there, a folder of a local disk, and host_capacity in 'zero', the bytes of host"
            " memory beyond which weights, gradients and optimizer states go to that folder"
        )
    for other in (states.get("nvme_path"), options.get("disk_dir")):
        if other is not None and str(other) != str(folder):
            raise ConfigException(
                f"config section 'zero' has offload_param_config with nvme_path={str(folder)!r}, which takes"
                f" optimizer states too, and {str(other)!r} beside it; name one folder"
            )
    return str(folder)


def _device(name: str, section: Mapping[str, Any]) -> str:
    device = section.get("device") or ("nvme" if section.get("nvme_path") else "none")
    if device not in ("none", "cpu", "nvme"):
        raise ConfigException(
            f"config section 'zero' needs the device of {name} to be 'none', 'cpu' or 'nvme', got {device!r}"
        )
    return str(device)
