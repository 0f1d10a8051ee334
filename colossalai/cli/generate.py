"""``colossalai generate``: a model writes on in the terminal."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

# Whatever imports torch is imported by the command: ``colossalai run`` need not wait.

_PATH = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=_PATH)
@click.option("--prompt", help="What the model goes on from. Default: read from standard input.")
@click.option("--max-tokens", type=_COUNT, default=128, show_default=True, help="The most tokens to write.")
@click.option(
    "--temperature", type=float, default=1.0, show_default=True, help="0 takes the most likely token."
)
@click.option("--top-k", type=int, default=0, help="Draw among so many most likely tokens. Default: all.")
@click.option(
    "--top-p", type=float, default=1.0, help="Draw among the most likely tokens of this share. Default: 1."
)
@click.option(
    "--min-p", type=float, default=0.0, help="Leave out what is less likely than this share of the first."
)
@click.option(
    "--repetition-penalty", type=float, default=1.0, help="Above 1: words are used less often again."
)
@click.option("--seed", type=int, help="Draw the same each time.")
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."
)
@click.option("--tp", type=_COUNT, help="Tensor-parallel processes. Default: all of a launched job.")
@click.option("--pp", type=_COUNT, default=1, show_default=True, help="Stages of a pipeline.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Of the weights. Default: the model's."
)
@click.option(
    "--config", type=_PATH, help="Folder with config.json, where MODEL is a checkpoint of booster.save."
)
@click.option("--tokenizer", type=_PATH, help="Folder with the tokenizer. Default: that of the config.")
def generate(model: Path, prompt: str | None, tp: int | None, pp: int, **options: Any) -> None:
    """Let the language model in MODEL write on, and print its text as it comes.

    MODEL is a folder as save_pretrained writes it, or a checkpoint of booster.save together with --config.

    \b
      colossalai generate opt-125m --prompt "The meaning of life is" --temperature 0
      colossalai generate opt-125m < prompt.txt
    \b
    On two GPUs, and as a pipeline of two stages with two GPUs each:
      colossalai run --nproc_per_node 2 -m colossalai generate opt-6.7b --prompt "Once"
      colossalai run --nproc_per_node 4 -m colossalai generate opt-6.7b --pp 2 --prompt "Once"
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = (world // pp if tp is None else tp) * pp
    if ranks != world:
        needed = max(ranks, pp)
        raise click.ClickException(
            f"--tp {tp or 'of all'} and --pp {pp} need {needed} processes, and there"
            f" {'is 1' if world == 1 else f'are {world}'}; start them with\n"
            f"  colossalai run --nproc_per_node {needed} -m colossalai generate {shlex.quote(str(model))} ..."
        )
    if prompt is None:
        if world > 1:
            raise click.ClickException("give --prompt: several processes have no standard input in common")
        prompt = sys.stdin.read()
    try:
        _write(model, prompt, ranks // pp, pp, **options)
    except (ValueError, OSError, RuntimeError) as error:
        if world > 1:  # the launcher shows it once, with the rank
            raise
        raise click.ClickException(str(error)) from error


def _write(
    model: Path,
    prompt: str,
    tp: int,
    pp: int,
    *,
    dtype: str | None,
    config: Path | None,
    tokenizer: Path | None,
    stop: tuple[str, ...],
    **sampling: Any,
) -> None:
    import colossalai
    from colossalai.inference import Generator, Sampling, load_model
    from colossalai.serving.loading import open_tokenizer

    asked = Sampling(stop=stop, **sampling)
    if tp * pp > 1:
        parallel = {"tensor": {"size": tp, "mode": "1d"}, "pipeline": pp}
        colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    kinds = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", None: None}
    words = open_tokenizer(tokenizer or config or model)
    loaded = load_model(model, config=config, dtype=kinds[dtype])
    generator = Generator(loaded, words, max_requests=1)
    for event in generator.stream(prompt, asked):
        click.echo(event.text, nl=False)
        sys.stdout.flush()
        if event.error is not None:
            raise RuntimeError(event.error)
    if generator.team.is_first:
        click.echo()
    generator.close()
