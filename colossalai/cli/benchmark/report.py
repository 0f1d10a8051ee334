"""The numbers of the benchmark as lines, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from colossalai.cli.benchmark.measure import Measurement, MeasureRequest
from colossalai.cli.benchmark.runner import BenchmarkOutcome

MB = 1024 * 1024

_COLUMNS: dict[str, Callable[[Measurement], float]] = {
    "forward (ms)": lambda r: r.forward,
    "backward (ms)": lambda r: r.backward,
    "memory (MB)": lambda r: r.allocated / MB,
    "sent per rank (MB)": lambda r: (r.sent_forward + r.sent_backward) / MB,
}


def parameter_lines(devices: int, request: MeasureRequest) -> list[str]:
    shape = request.shape
    given = {
        "gpus": devices,
        "batch_size": shape.batch_size,
        "seq_len": shape.seq_len,
        "dimension": shape.dimension,
        "warmup_steps": request.warmup_steps,
        "profile_steps": request.profile_steps,
        "layers": shape.layers,
        "model": request.model,
        "device": "cuda" if request.device == "cuda" else "cpu (each rank is a process with one thread)",
    }
    return ["=== Benchmarking Parameters ===", *(f"{name}: {value}" for name, value in given.items())]


def outcome_lines(outcome: BenchmarkOutcome) -> list[str]:
    """What is printed below the heading of a plan."""
    r = outcome.result
    if r is None:
        return [f"failed: {outcome.error}"]
    counted = "" if r.cached is not None else " (no GPU: the tensors alive on the CPU, counted by us)"
    cached = "none (no GPU: the CPU's allocator keeps no account)"
    return [
        f"Average forward time: {r.forward:.3f} ms",
        f"Average backward time: {r.backward:.3f} ms",
        f"Max allocated GPU memory: {r.allocated / MB:.2f} MB{counted}",
        f"Max cached GPU memory: {cached if r.cached is None else f'{r.cached / MB:.2f} MB'}",
        f"Bytes communicated: {r.sent_forward:,.0f} forward, {r.sent_backward:,.0f} backward, sent by each"
        " rank",
    ]


def table(outcomes: Sequence[BenchmarkOutcome]) -> str:
    """One line per plan; the last column is the time of a step as a share of the serial one's."""
    width = max(len(o.plan.short) for o in outcomes) + 2
    lines = [f"{'plan':{width}}" + "".join(f"{title:>20}" for title in _COLUMNS) + f"{'step / serial':>15}"]
    serial = next((o.result for o in outcomes if o.result and o.plan.mode is None), None)
    for o in outcomes:
        if o.result is None:
            lines.append(f"{o.plan.short:{width}}  failed: {o.error}")
            continue
        numbers = "".join(f"{read(o.result):20.3f}" for read in _COLUMNS.values())
        ratio = f"{_step(o.result) / _step(serial):15.2f}" if serial else ""
        lines.append(f"{o.plan.short:{width}}{numbers}{ratio}")
    return "\n".join(lines)


def _step(result: Measurement) -> float:
    return result.forward + result.backward


def plot(outcomes: Sequence[BenchmarkOutcome], path: Path, request: MeasureRequest) -> Path:
    """A bar per plan in four panels: forward, backward, memory, bytes."""
    import matplotlib as mpl

    mpl.use("Agg")  # no window: also works without a display
    from matplotlib import pyplot as plt

    measured = [(o.plan.short, o.result) for o in outcomes if o.result]
    figure, panels = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axes, (name, read) in zip(panels.flat, _COLUMNS.items(), strict=True):
        bars = axes.bar([plan for plan, _ in measured], [read(result) for _, result in measured])
        axes.bar_label(bars, fmt="%.4g", fontsize=8)
        axes.set_title(name)
        axes.tick_params(axis="x", rotation=30)
        axes.margins(y=0.12)
    shape = request.shape
    figure.suptitle(
        f"{request.model} on {request.device}: batch {shape.batch_size} x sequence {shape.seq_len} x"
        f" dimension {shape.dimension}, {shape.layers} layers"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
