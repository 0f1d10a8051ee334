"""The facts about this machine and this installation, as rows of sections.

Whatever can be tried in a moment is tried, on a tensor of a few numbers: a library that is there is not yet
one that works.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.version import Version

from colossalai._version import __version__
from colossalai.kernel import implementations

OLDEST_TORCH = "2.11"
OLDEST_PYTHON = "3.10"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: ``value`` is a text, or True, False, None for yes, no, does not apply here."""

    label: str
    value: str | bool | None
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Lines under one title; in a ``decisive`` section a "no" means that something must be repaired."""

    title: str
    rows: list[Row]
    notes: tuple[str, ...] = ()
    decisive: bool = False


@dataclass(frozen=True, kw_only=True)
class Component:
    """An optional part: a Python package, or a program if ``is_program``."""

    name: str
    purpose: str
    how: str
    is_program: bool = False


COMPONENTS = (
    Component(name="rich", purpose="coloured log lines", how="pip install rich"),
    Component(name="safetensors", purpose="checkpoints", how="pip install safetensors"),
    Component(name="matplotlib", purpose="loss curves", how='pip install "colossalai[plot]"'),
    Component(name="transformers", purpose="Hugging Face models", how="pip install transformers"),
    Component(
        name="ssh", purpose="run on several hosts", how="apt-get install openssh-client", is_program=True
    ),
    Component(name="mpirun", purpose="OpenMPI", how="apt-get install openmpi-bin", is_program=True),
    Component(name="srun", purpose="SLURM", how="apt-get install slurm-wlm", is_program=True),
)


def inspect_installation() -> list[Section]:
    return [
        _environment(),
        _extensions(),
        _compatibility(),
        Section(title="Communication", rows=_backends()),
        Section(title="Kernels", rows=_kernels()),
        Section(title="Optional Components", rows=[_component(component) for component in COMPONENTS]),
    ]


def _environment() -> Section:
    rows = [
        Row(label="Colossal-AI version", value=__version__),
        Row(label="PyTorch version", value=torch.__version__),
        Row(label="System CUDA version", value=system_cuda_version()),
        Row(label="CUDA version required by PyTorch", value=torch.version.cuda),
        Row(label="Python version", value=platform.python_version()),
        Row(label="System", value=f"{platform.system()} {platform.release()} {platform.machine()}"),
        Row(
            label="CPU", value=f"{usable_cores()} of {os.cpu_count()} cores usable", remark=_cpu_capability()
        ),
        Row(label="Memory", value=f"{memory_bytes() / _GIB:.1f} GiB"),
        *_devices(),
    ]
    return Section(title="Environment", rows=rows, notes=tuple(_advice()))


def _devices() -> list[Row]:
    if not torch.cuda.is_available():
        return [Row(label="GPU", value=None, remark="everything runs on the CPU, with gloo")]
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / _GIB:.1f} GiB"
        rows.append(Row(label=f"GPU {index}", value=f"{properties.name}, {memory}", remark=capability))
    return rows


def _advice() -> list[str]:
    if torch.cuda.is_available():
        return []
    driver = shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None and torch.version.hip is None and driver:
        return [
            "this machine has an NVIDIA driver, but PyTorch is a build without CUDA; see pytorch.org for one"
        ]
    if torch.version.cuda is not None:
        return ["PyTorch sees no GPU; look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES"]
    return []


def _extensions() -> Section:
    note = "no extension is compiled, now or at import: the kernels below come with PyTorch and Triton"
    return Section(
        title="CUDA Extensions AOT Compilation",
        rows=[Row(label="Found AOT CUDA Extension", value=None)],
        notes=(note,),
    )


def _compatibility() -> Section:
    python, torch_version = platform.python_version(), torch.__version__
    rows = [
        Row(
            label="PyTorch version match",
            value=Version(torch_version) >= Version(OLDEST_TORCH),
            remark=f"{torch_version}, needs at least {OLDEST_TORCH}",
        ),
        Row(
            label="Python version match",
            value=Version(python) >= Version(OLDEST_PYTHON),
            remark=f"{python}, needs at least {OLDEST_PYTHON}",
        ),
        cuda_match(system_cuda_version(), torch.version.cuda),
        Row(label="PyTorch can compute on the GPU", value=_gpu_computes()),
    ]
    return Section(title="Compatibility", rows=rows, decisive=True)


def cuda_match(system: str | None, pytorch: str | None) -> Row:
    """Within one major version CUDA is compatible; the toolkit matters only for compiling extensions."""
    label = "System and PyTorch CUDA version match"
    if system is None or pytorch is None:
        return Row(label=label, value=None)
    same = Version(system).major == Version(pytorch).major
    remark = (
        "" if same else f"toolkit {system}, PyTorch {pytorch}: install the toolkit of PyTorch's major version"
    )
    return Row(label=label, value=same, remark=remark)


def _gpu_computes() -> bool | None:
    if not torch.cuda.is_available():
        return None
    return _works(lambda: torch.ones(2, device="cuda").sum().item())


def _backends() -> list[Row]:
    gpu = torch.cuda.is_available()
    nccl = gpu and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""
    return [
        Row(
            label="gloo", value=torch.distributed.is_gloo_available(), remark="CPU, and several ranks per GPU"
        ),
        _row("NCCL", nccl if gpu else None, version, "another build of PyTorch"),
    ]


def _kernels() -> list[Row]:
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    triton = importlib.util.find_spec("triton") is not None if gpu else None
    compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    fp8 = torch.cuda.get_device_capability() >= (8, 9) if gpu else None
    return [
        _row("Fused AdamW", _works(lambda: _fused_adamw(device)), f"on {device}", "another build of PyTorch"),
        _row("Flash attention", _works(lambda: _flash(device)), f"on {device}", "a GPU since Ampere"),
        _row("Triton", triton, _version("triton"), "pip install triton"),
        _row("torch.compile on the GPU", triton, "", "Triton"),
        _row("torch.compile on the CPU", compiler, "", "a C++ compiler: apt-get install g++"),
        _row("FP8 matrix products", fp8, "", "a GPU since Ada, compute capability 8.9"),
        *(Row(label=f"Step of {name}", value=way) for name, way in implementations().items()),
    ]


def _row(label: str, value: bool | None, remark: str, remedy: str) -> Row:
    """``remedy`` is what a "no" lacks; what does not apply lacks a GPU."""
    remarks = {True: remark, False: f"needs {remedy}", None: "needs a GPU"}
    return Row(label=label, value=value, remark=remarks[value])


def _works(trial: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trial()
        except (RuntimeError, NotImplementedError):  # how torch says that a build or a device cannot do it
            return False
    return True


def _fused_adamw(device: str) -> None:
    weight = torch.ones(2, device=device, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight], fused=True).step()


def _flash(device: str) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = torch.ones(1, 1, 16, 64, device=device, dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def _component(component: Component) -> Row:
    if component.is_program:
        found = shutil.which(component.name) is not None
        known = ""
    else:
        found = importlib.util.find_spec(component.name) is not None
        known = f" {_version(component.name)}" if found else ""
    remark = component.purpose if found else f"{component.purpose}: {component.how}"
    return Row(label=component.name + known, value=found, remark=remark)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def system_cuda_version() -> str | None:
    """The version of the CUDA toolkit on this machine, told by its compiler."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    return found.group(1) if found else None


def usable_cores() -> int:
    """What this process may use, which in a container or a batch job is often less than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory, or less if a container limits it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical


def _cpu_capability() -> str:
    return torch.backends.cpu.get_cpu_capability()
