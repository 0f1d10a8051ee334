"""``colossalai benchmark``: from the options to the report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from colossalai.cli.benchmark.serve import serve

if TYPE_CHECKING:
    from colossalai.cli.benchmark.measure import MeasureRequest

_POSITIVE = click.IntRange(min=1)
_CPU_RANKS = 4  # the fewest on which a grid of two dims exists
_NO_MATPLOTLIB = "matplotlib is not installed (pip install matplotlib)"


@click.group(
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "token_normalize_func": lambda name: name.replace("-", "_"),  # --batch-size works too
    },
)
@click.option(
    "-g",
    "--gpus",
    type=_POSITIVE,
    show_default=f"all GPUs, or {_CPU_RANKS} processes on a CPU",
    help="Devices to use; plans are tried on every number of ranks that divides it.",
)
@click.option("-b", "--batch_size", type=_POSITIVE, default=8, help="Samples in the batch.")
@click.option("-s", "--seq_len", type=_POSITIVE, default=512, help="Tokens of a sample.")
@click.option("-d", "--dimension", type=_POSITIVE, default=1024, help="Features of a token.")
@click.option("-w", "--warmup_steps", type=click.IntRange(min=0), default=10, help="Steps before the timing.")
@click.option("-p", "--profile_steps", type=_POSITIVE, default=50, help="Steps that are timed.")
@click.option("-l", "--layers", type=_POSITIVE, default=2, help="MLPs, or transformer blocks.")
@click.option(
    "-m",
    "--model",
    type=click.Choice(["mlp", "gpt", "vit"]),
    default="mlp",
    help="The model that is measured.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="auto: the GPUs where there are any.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    show_default="colossalai_benchmark.png",
    help="Where the picture goes (a .png file); it needs matplotlib.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=3600.0, help="Seconds that one plan may take."
)
@click.pass_context
def benchmark(
    context: click.Context,
    *,
    gpus: int | None,
    batch_size: int,
    seq_len: int,
    dimension: int,
    warmup_steps: int,
    profile_steps: int,
    layers: int,
    model: str,
    device: str,
    output: Path | None,
    timeout: float,
) -> None:
    """Compare all tensor-parallel plans of this machine on a small model; or, with the command serve, load a
    server.

    Every mode (none, 1D, 2D, 2.5D with every depth, 3D) runs forward and backward on as many ranks as divide
    --gpus, one plan after the other; the other devices are idle meanwhile. Times are averages over
    the timed steps, of the slowest rank; memory is that of the fullest rank; bytes are what each rank sends.

    \b
    colossalai benchmark --gpus 4
    colossalai benchmark --gpus 8 --model gpt --dimension 2048
    colossalai benchmark --gpus 4 --device cpu -b 4 -s 64 -d 256 -p 5     a minute without a GPU

    A plan that does not fit the sizes is reported with the reason, and the others go on. Only one machine is
    used.
    """
    if context.invoked_subcommand is not None:
        return
    target = _picture(output)
    from colossalai.cli.benchmark.measure import MeasureRequest
    from colossalai.cli.benchmark.models import ModelSizes

    device, gpus = _devices(device, gpus)
    request = MeasureRequest(
        model=model,
        shape=ModelSizes(batch_size=batch_size, seq_len=seq_len, dimension=dimension, layers=layers),
        warmup_steps=warmup_steps,
        profile_steps=profile_steps,
        device=device,
    )
    sys.exit(_run(gpus, request, target, timeout))


benchmark.add_command(serve)


def _run(gpus: int, request: MeasureRequest, target: Path | None, timeout: float) -> int:
    from colossalai.cli.benchmark import report
    from colossalai.cli.benchmark.plans import all_plans
    from colossalai.cli.benchmark.runner import run_plan

    click.echo("\n".join(report.parameter_lines(gpus, request)))
    outcomes = []
    for plan in all_plans(gpus):
        click.echo(f"\n=== {plan} ===")
        outcomes.append(run_plan(plan, request, timeout))
        click.echo("\n".join(report.outcome_lines(outcomes[-1])))
    click.echo(f"\n=== Summary ===\n{report.table(outcomes)}")
    if not any(o.result for o in outcomes):
        return 1
    if target is None:
        click.echo(f"\nno picture: {_NO_MATPLOTLIB}")
    else:
        click.echo(f"\npicture: {report.plot(outcomes, target, request)}")
    return 0


def _devices(device: str, gpus: int | None) -> tuple[str, int]:
    """The kind and the number of devices that the options mean on this machine."""
    import torch

    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if present else "cpu"
    if device == "cpu":
        return device, gpus or _CPU_RANKS
    if not present:
        raise click.ClickException("--device cuda: torch finds no GPU here; use --device cpu")
    if gpus is not None and gpus > present:
        raise click.ClickException(
            f"--gpus {gpus}: this machine has {present}; use --gpus {present}, or --device cpu for {gpus}"
            " processes on the CPU"
        )
    return device, gpus or present


def _picture(output: Path | None) -> Path | None:
    """Where the picture goes, refused now rather than after an hour of measuring; None if nothing can draw
    it.
    """
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if output is None:
        return Path("colossalai_benchmark.png") if can_draw else None
    if not can_draw:
        raise click.ClickException(f"--output {output}: {_NO_MATPLOTLIB}")
    if output.suffix != ".png":
        raise click.ClickException(f"--output {output}: the picture is a .png file")
    if not output.absolute().parent.is_dir():
        raise click.ClickException(f"--output {output}: there is no folder {output.absolute().parent}")
    return output
