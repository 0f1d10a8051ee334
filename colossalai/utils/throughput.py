"""Tokens per second, operations per second and their share of what the device could do (MFU).

The operations are counted, not given by the user: one step runs under ``OperationCounter``, which sees every
matrix product, convolution and attention of its forward and backward pass, whatever the model and the plan.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, shape_wrapper

from colossalai.utils.device import synchronize

# Device name -> dense bf16 (where there is none, fp16) operations per second with fp32 sums, in units of
# 10**12, as the vendors publish them; the first that fits counts.
_PEAKS = (
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\b(H100|H800)\b.*PCIe", 756.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\b(H100|H200|H800|GH200)\b", 989.0),
    (r"\bH20\b", 148.0),
    (r"\b(A100|A800)\b", 312.0),
    (r"\bA40\b", 150.0),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bV100\b", 125.0),
    (r"\bT4\b", 65.0),
    (r"\bRTX 4090\b", 165.0),
    (r"\bMI300X\b", 1307.0),
    (r"\bMI250X\b", 383.0),
)


_ATTENTION = "_scaled_dot_product_{}_attention{}"
_KINDS = (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The two products of (batch, heads, tokens, features); keys may have fewer heads than queries."""
    batch, heads, rows, width = query
    return int(2 * batch * heads * rows * key[2] * (width + value[3]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * _attention(query, key, value)


def _attention_formulas() -> dict[Any, Any]:
    """What torch does not count: attention on a CPU; and what it counts too high: a backward pass of fused
    attention, where it adds the scores that the kernel computes again.
    """
    found: dict[Any, Any] = {}
    for kind, device in _KINDS:
        name = _ATTENTION.format(kind, device)
        found[getattr(torch.ops.aten, name)] = _attention
        found[getattr(torch.ops.aten, f"{name}_backward")] = _attention_backward
    return found


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """A product of groups of rows with a matrix each, or of groups of columns, of which the groups are cut
    from one tensor: as many operations as without groups.
    """
    if len(a) == 3 and len(b) == 3:
        return int(2 * a[0] * a[1] * a[2] * b[2])
    return int(2 * a[-2] * a[-1] * b[-1])


def _grouped_backward(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * _grouped(a, b)


# Operations that packages register when they are imported: mixtures of experts of transformers.
_NAMED = {
    "aten._grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    "transformers.grouped_mm_fallback_backward": _grouped_backward,
}


class OperationCounter(FlopCounterMode):
    """Counts the operations of products, convolutions and attention inside a ``with`` block.

    A product of m x k and k x n has 2mkn.  Recomputation does not count: it is no work of the model.  What
    ``torch.compile`` compiled runs as it was written meanwhile; torch would otherwise not compile it later
    either.
    """

    operations = 0

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_attention_formulas())
        self.mod_tracker = nullcontext()  # type: ignore[assignment]  # its hooks on all modules are not needed
        self._eager = ExitStack()

    def __enter__(self) -> OperationCounter:
        self.operations = 0
        self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        with self._eager:
            return super().__exit__(*error)

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # a backward pass does not build a graph; what does so within it is a forward pass that is repeated
        repeated = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        if func_packet not in self.flop_registry and str(func_packet) in _NAMED:
            self.flop_registry[func_packet] = shape_wrapper(_NAMED[str(func_packet)])
        if func_packet in self.flop_registry and not repeated:
            count: Any = self.flop_registry[func_packet]
            self.operations += int(count(*args, **kwargs, out_val=out))
        return out


def count_operations(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Run ``function`` and count its operations on this rank, those of backward passes in it included."""
    with OperationCounter() as counter:
        function(*args, **kwargs)
    return counter.operations


def peak_tflops(name: str | None = None) -> float | None:
    """The most bf16 operations per second of this process's GPU (or the one called ``name``), in units of
    10**12; None where it is not known, or there is none.
    """
    if name is None:
        if not torch.cuda.is_available():
            return None
        name = torch.cuda.get_device_name()
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, name)), None)


def share_of_peak(tflops: float) -> float | None:
    """The MFU of so many operations per second; None where the peak of the device is not known."""
    peak = peak_tflops()
    return tflops / peak if peak else None


def work_text(tflops: float) -> str:
    """``312 Tflops, MFU 31.5%``, or without the share where the peak of the device is not known."""
    share = share_of_peak(tflops)
    return f"{tflops:.5g} Tflops" + ("" if share is None else f", MFU {share:.1%}")


class Throughput:
    """Measures the steps of a training loop: samples, tokens and operations per second of this rank.

    The first step is counted, which slows it down, and does not enter the times; the operations of later
    steps are taken to grow with their samples, or tokens.

    Args:
        ignored_steps: steps at the start that do not enter the times, at least the first.
    """

    def __init__(self, ignored_steps: int = 1) -> None:
        if ignored_steps < 1:
            raise ValueError(
                f"Throughput leaves at least the first step out, in which it counts, got {ignored_steps=}"
            )
        self.ignored_steps = ignored_steps
        self.operations = 0
        """Those of the step that was counted."""
        self._counted_size = self._size = 0
        self._seen = self._steps = self._samples = self._tokens = 0
        self._seconds = 0.0

    @contextmanager
    def step(self, samples: int = 0, tokens: int = 0) -> Iterator[None]:
        """One training step, with the number of samples, of tokens, or both, that this rank works on."""
        size = tokens or samples
        counts = self._seen == 0
        synchronize()
        start = time.perf_counter()
        with OperationCounter() if counts else nullcontext() as counter:
            yield
        synchronize()
        self._seen += 1
        if counts and counter is not None:
            self.operations, self._counted_size = counter.operations, size
        if self._seen > self.ignored_steps:
            self._seconds += time.perf_counter() - start
            self._steps += 1
            self._samples += samples
            self._tokens += tokens
            self._size += size

    @property
    def samples_per_second(self) -> float:
        return self._samples / self._seconds if self._seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def tflops(self) -> float:
        """Operations per second, in units of 10**12."""
        counted = self._size / self._counted_size if self._counted_size else self._steps
        return self.operations * counted / self._seconds / 1e12 if self._seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """The share of the device's peak, or None where that is not known."""
        return share_of_peak(self.tflops)

    def __str__(self) -> str:
        rates = [
            f"{rate:.5g} {unit}/s"
            for rate, unit in ((self.samples_per_second, "samples"), (self.tokens_per_second, "tokens"))
            if rate
        ]
        return ", ".join([*rates, work_text(self.tflops)])


__all__ = ["OperationCounter", "Throughput", "count_operations", "peak_tflops", "share_of_peak", "work_text"]
