"""The options that training scripts share, each in the same words."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose ``--help`` shows ``description``, the docstring of a script, as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def image_parser(
    description: str | None, config: Path | None = None, what: str = "sizes, rates and features"
) -> argparse.ArgumentParser:
    """A parser for training on CIFAR-10: ``--data``, and ``--config`` where there is one to begin with;
    ``what`` says its contents.
    """
    parser = script_parser(description)
    if config is not None:
        parser.add_argument("--config", type=_file, default=config, help=f"{what} (%(default)s)")
    parser.add_argument(
        "--data",
        default=os.environ.get("DATA", "data"),
        help="folder of CIFAR-10's python version; default: $DATA, or data. Without it, digits of"
        " scikit-learn or"
        " synthetic images take its place",
    )
    return parser


def add_synthetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-s",
        "--synthetic",
        action="store_true",
        help="a few batches of noise per epoch, instead of CIFAR-10 or its stand-in",
    )


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}; the folders of examples/ have configs")
    return path
