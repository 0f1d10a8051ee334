"""``colossalai ckpt``: shows, verifies and converts checkpoints."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from colossalai.checkpoint_io.inspection.views import View

# Whatever imports torch is imported by the command that needs it: ``colossalai run`` need not wait.

_LONG_WORK = 1 << 28  # bytes from which on a progress bar is shown
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# what ``from_pretrained`` of a model or tokenizer reads beside the weights
_COMPANIONS = (
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
)
_PATH = click.Path(path_type=Path)


@click.group(context_settings=_SETTINGS)
def ckpt() -> None:
    """Look at checkpoints, check them, convert them.

    PATH is a checkpoint of booster.save or a folder of several, a folder of shards with an index (also of
    Hugging Face), or a single .bin, .pt or .safetensors file of weights or of an optimizer. Nothing that is
    in a checkpoint is executed.
    """


@ckpt.command(context_settings=_SETTINGS)
@click.argument("path", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")
@click.option("--summary", is_flag=True, help="Leave out the table of tensors.")
def show(path: Path, as_json: bool, summary: bool) -> None:
    """Show what is in the checkpoint at PATH: tensors with their shapes, dtypes and sizes, the plan that it
    was written under, the step.

    Of a folder with several checkpoints of booster.save, all are listed and the latest is shown.

    \b
      colossalai ckpt show checkpoints
      colossalai ckpt show checkpoints/step-200 --json
    """
    from colossalai.cli import ckpt_text

    with _errors():
        views = _views(path)
    if as_json:
        print(json.dumps([ckpt_text.as_data(view, tensors=not summary) for view in views], indent=2))
        return
    runs = [view for view in views if view.kind == "run"]
    if len(runs) > 1:
        print(ckpt_text.listing(runs) + "\n")
        views = runs[-1:]
    print("\n\n".join(ckpt_text.describe(view, tensors=not summary) for view in views))


@ckpt.command(context_settings=_SETTINGS)
@click.argument("path", type=_PATH)
def verify(path: Path) -> None:
    """Read all of the checkpoint at PATH and compare it with its checksums: is every file of every rank
    there, and whole?

    Each fault is a line with the file and the tensor; then the exit code is 1. Of a folder with several
    checkpoints, all are verified.
    """
    from colossalai.checkpoint_io.inspection.detect import faults_of, find_forms, size_on_disk

    with _errors():
        forms = find_forms(path)
    count = 0
    for form in forms:
        found = 0
        with _progress(size_on_disk(form), f"verifying {form}") as advance:
            for fault in faults_of(form, advance):
                click.echo(str(fault))
                found += 1
        click.echo(f"{form}: {_faults(found) if found else _soundness(form)}")
        count += found
    sys.exit(1 if count else 0)


@ckpt.command(context_settings=_SETTINGS)
@click.argument("source", metavar="SRC", type=_PATH)
@click.argument("target", metavar="DST", type=_PATH)
@click.option(
    "--to",
    type=click.Choice(["huggingface", "checkpoint"]),
    default="huggingface",
    show_default=True,
    help="What folder DST becomes: one that transformers opens, or a checkpoint for booster.load.",
)
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="Convert the weights. Default: as they are.")
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True),
    metavar="PATH",
    help="A config.json, or a folder with one (and a tokenizer), that goes beside the weights. "
    "Default: those beside SRC.",
)
@click.option(
    "--size_per_shard",
    type=click.FloatRange(min=0, min_open=True),
    default=5120,
    show_default=True,
    metavar="MB",
    help="The largest size of a file in a folder.",
)
@click.option(
    "--section", default="model", show_default=True, help="The name of the model, if a run has several."
)
def convert(
    source: Path,
    target: Path,
    to: str,
    dtype: str | None,
    config: Path | None,
    size_per_shard: float,
    section: str,
) -> None:
    """Write the weights of the checkpoint SRC to DST, which must not exist yet, in another form.

    A DST that ends in .safetensors, .bin or .pt becomes one file (shards are merged); any other a folder. Of
    a folder with several checkpoints the latest is taken. One tensor at a time is in memory, but for a .bin
    file all of them.

    \b
    The weights of a run, for transformers:
      colossalai ckpt convert checkpoints mymodel --dtype bf16 --config gpt2
    \b
    Weights of Hugging Face as a checkpoint for booster.load:
      colossalai ckpt convert gpt2 start --to checkpoint
    \b
    Shards of weights, or of an optimizer, as one file:
      colossalai ckpt convert sharded model.safetensors
      colossalai ckpt convert sharded/pytorch_optim.bin.index.json optimizer.bin
    """
    from colossalai.checkpoint_io.inspection import convert

    with _errors():
        _check_target(target)
        view = _one(source, target)
        if view.kind == "optimizer":
            _check_optimizer(target, dtype)
            with convert.complete_or_absent(target) as draft:
                convert.merge_optimizer(view, draft)
        else:
            weights = convert.weights_of(view, _torch_dtype(dtype), section)
            with _progress(2 * weights.nbytes, f"converting {view.path}") as advance:
                if _is_file(target):
                    with convert.complete_or_absent(target) as draft:
                        convert.write_one_file(weights, draft, advance)
                elif to == "checkpoint":  # it is complete or absent by itself
                    convert.write_run(weights, target, size_per_shard, advance)
                else:
                    with convert.complete_or_absent(target) as draft:
                        draft.mkdir()
                        convert.write_hugging_face(weights, draft, size_per_shard, advance)
                        _copy_companions(view.path, config, draft)
    click.echo(f"{view.path} -> {target}")


def _views(path: Path) -> list[View]:
    from colossalai.checkpoint_io.inspection.detect import find_forms, open_checkpoint

    return [open_checkpoint(form) for form in find_forms(path)]


def _one(source: Path, target: Path) -> View:
    """The checkpoint that is to be converted: the latest run, or the weights, or the optimizer if there is
    nothing else.
    """
    views = _views(source)
    if views[-1].kind == "run":
        return views[-1]
    weights = [view for view in views if view.kind != "optimizer"]
    candidates = weights or views
    if len(candidates) > 1:
        names = ", ".join(str(view.path) for view in candidates)
        raise ValueError(f"{source} holds several checkpoints; pass the path of one: {names}")
    return candidates[0]


def _check_target(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists; pass a new path")


def _check_optimizer(target: Path, dtype: str | None) -> None:
    if not _is_file(target) or target.suffix == ".safetensors":
        raise ValueError(
            "the states of an optimizer can be merged into one file, which must end in .bin or .pt; got"
            f" {target}"
        )
    if dtype is not None:
        raise ValueError("--dtype is for weights; the states of an optimizer stay as they are")


def _is_file(target: Path) -> bool:
    return target.suffix in (".safetensors", ".bin", ".pt", ".pth")


def _torch_dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, _DTYPES[name])


def _copy_companions(source: Path, config: Path | None, folder: Path) -> None:
    if config is not None and config.is_file():
        shutil.copyfile(config, folder / "config.json")
        return
    home = config or (source if source.is_dir() else source.parent)
    for pattern in _COMPANIONS:
        for path in home.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    if not (folder / "config.json").is_file():
        where = "--config" if config is None else str(config)
        click.echo(
            f"Note: no config.json in {home}; transformers needs one beside the weights ({where})", err=True
        )


def _faults(count: int) -> str:
    return "1 fault" if count == 1 else f"{count} faults"


def _soundness(form: Path) -> str:
    from colossalai.checkpoint_io.inspection.detect import open_checkpoint
    from colossalai.checkpoint_io.inspection.views import RunView

    view = open_checkpoint(form)
    size = f"{len(view.items)} tensors, {view.nbytes:,} bytes in {len(view.files)} files"
    if isinstance(view, RunView) and (left := view.leftovers()):
        removed = f"{len(left)} files of a save that was interrupted, which the next save removes"
        return f"sound ({size}); beside it {removed}"
    if view.has_checksums:
        return f"sound ({size})"
    return f"complete ({size}); it has no checksums, so damage to the values would not be seen"


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """What is wrong with paths and files is one line, not a traceback."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _progress(total: int, label: str) -> Iterator[Callable[[int], object]]:
    """A bar on the terminal, if there is one and the work is long."""
    if total < _LONG_WORK or not sys.stderr.isatty():
        yield lambda n: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, file=sys.stderr) as bar:
        yield bar.update
