"""``colossalai benchmark serve``: a load for a server, as a table and a picture."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from colossalai.cli.benchmark.load import Load, Mix, Sample, percentile, run_load

_SHARES = (0.5, 0.9, 0.99)
_TIMES: dict[str, Callable[[Sample], float | None]] = {
    "time to first token": lambda sample: sample.first,
    "time per token": lambda sample: sample.per_token,
    "whole request": lambda sample: sample.last,
}


class _MixType(click.ParamType):
    name = "LENGTHS"

    def convert(self, value: Any, param: Any, ctx: Any) -> Mix:
        try:
            return value if isinstance(value, Mix) else Mix.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "token_normalize_func": lambda name: name.replace("-", "_"),
    }
)
@click.argument("url")
@click.option("-n", "--requests", type=click.IntRange(min=1), default=200, help="How many.")
@click.option("--prompts", type=_MixType(), default="128", help="Tokens of prompts: 128, or 32:0.7,512:0.3.")
@click.option("--outputs", type=_MixType(), default="128", help="Tokens of answers, in the same way.")
@click.option(
    "--rate",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Requests in a second, with exponential pauses; 0: all at once.",
)
@click.option("--concurrency", type=click.IntRange(min=1), default=64, help="Requests under way at most.")
@click.option(
    "--vocabulary", type=click.IntRange(min=8), default=250, help="Prompts are tokens from 3 to this one."
)
@click.option("--seed", type=int, default=0, help="The same seed asks the same.")
@click.option("--temperature", type=click.FloatRange(min=0, max=2), default=0.0)
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, help="Seconds for one answer.")
@click.option("--api_key", envvar="COLOSSALAI_API_KEY", help="What the server asks for.", show_default=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A picture (.png); needs matplotlib.",
)
def serve(
    url: str, *, timeout: float, api_key: str | None, as_json: bool, output: Path | None, **asked: Any
) -> None:
    """Load the server at URL, such as http://localhost:8000, and report its speed.

    Prompts are random tokens, and answers have exactly the lengths that were drawn, so two runs with one seed
    ask the same. The server must speak OpenAI's /v1/completions with streams, and know ignore_eos.

    \b
      colossalai benchmark serve http://localhost:8000 -n 500 --prompts 32:0.7,512:0.3 --rate 8 -o load.png
    """
    load = Load(**asked)
    try:
        samples = asyncio.run(run_load(url, load, key=api_key, timeout=timeout))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    found = summary(samples)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(load, found)))
    if output is not None:
        click.echo(f"picture: {picture(samples, load, found, output)}", err=as_json)
    sys.exit(1 if found["failed"] else 0)


def summary(samples: list[Sample]) -> dict[str, Any]:
    """The numbers of a run; times are in seconds."""
    seconds = max(sample.ended for sample in samples)
    done = [sample for sample in samples if sample.error is None]
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    times = {}
    for name, read in _TIMES.items():
        values = [value for sample in done if (value := read(sample)) is not None]
        times[name] = {f"p{share * 100:g}": percentile(values, share) for share in _SHARES} if values else {}
    output = sum(sample.tokens for sample in done)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(done),
        "errors": errors,
        "seconds": seconds,
        "output tokens/s": output / seconds,
        "all tokens/s": (output + sum(sample.prompt for sample in done)) / seconds,
        "requests/s": len(done) / seconds,
        "times": times,
    }


def lines(load: Load, found: dict[str, Any]) -> list[str]:
    arrival = f"{load.rate:g} requests/s" if load.rate else "all at once"
    text = [
        f"{load.requests} requests, {arrival}, at most {load.concurrency} under way, seed {load.seed}",
        f"tokens of prompts: {load.prompts}; of answers: {load.outputs}",
        f"{found['requests'] - found['failed']} answered, {found['failed']} failed, {found['seconds']:.2f} s",
        *(f"  {count} x {error}" for error, count in found["errors"].items()),
        f"{found['output tokens/s']:.1f} output tokens/s, {found['all tokens/s']:.1f} with prompts,"
        f" {found['requests/s']:.2f} requests/s",
        "",
        f"{'milliseconds':22}" + "".join(f"{f'p{share * 100:g}':>10}" for share in _SHARES),
    ]
    for name, values in found["times"].items():
        text.append(f"{name:22}" + "".join(f"{value * 1000:10.1f}" for value in values.values()))
    return text


def picture(samples: list[Sample], load: Load, found: dict[str, Any], path: Path) -> Path:
    """What share of the requests was faster than each time, and how the load went on."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    done = [sample for sample in samples if sample.error is None]
    figure, panels = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axes, (name, read) in zip(panels.flat, _TIMES.items(), strict=False):
        values = sorted(1000 * value for sample in done if (value := read(sample)) is not None)
        axes.plot(values, [100 * (i + 1) / len(values) for i in range(len(values))], drawstyle="steps-post")
        axes.set(title=name, xlabel="milliseconds", ylabel="% of requests", ylim=(0, 100))
        axes.set_xlim(left=0)
        for share in _SHARES if values else ():
            at = percentile(values, share)
            axes.axvline(at, color="gray", linewidth=0.6)
            axes.annotate(f"p{share * 100:g}", (at, 3), fontsize=7)
    axes = panels.flat[-1]
    axes.scatter(
        [s.sent for s in done], [s.last for s in done], s=[3 + s.wanted / 8 for s in done], alpha=0.5
    )
    axes.set(title="each request", xlabel="sent after (s)", ylabel="took (s)")
    speed = f"{found['output tokens/s']:.0f} output tokens/s"
    figure.suptitle(f"{found['requests']} requests, {found['failed']} failed, {speed}")
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
