"""The options of run_clm.py: those of Hugging Face's script of this name, and what Gemini adds."""

from __future__ import annotations

import argparse
from pathlib import Path

# of transformers.get_scheduler
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune OPT, or train it from scratch, under ZeRO-3 with Gemini.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _data(parser)
    _model(parser)
    _training(parser)
    args = parser.parse_args(arguments)
    if not args.synthetic and args.train_file is None and args.dataset_name is None:
        parser.error("text is needed: --train_file FILE or --dataset_name NAME; or -s for random tokens")
    if args.model_name_or_path is None and args.config_name is None:
        parser.error(
            "a model is needed: --model_name_or_path FOLDER to fine-tune it, or --config_name SIZE to train"
            " from scratch"
        )
    return args


def _data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("-s", "--synthetic", action="store_true", help="random tokens, and a model with random weights")
    add("--dataset_name", help="of the library datasets, which may download it")
    add("--dataset_config_name", help="the configuration of --dataset_name")
    add("--train_file", type=Path, help="a file of text")
    add("--validation_file", type=Path, help="a file of text; without it, a part of the training text")
    add("--validation_split_percentage", type=positive, default=5, help="how large this part is")
    add("--block_size", type=positive, help="tokens of a row; by default 1024, or as many as the model takes")


def _model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model_name_or_path",
        help="a folder with a checkpoint in safetensors; with -s a name such as facebook/opt-125m, of"
        " which the"
        " size counts",
    )
    add("--config_name", help="a size such as 125m, or a folder with a config.json: train from scratch")
    add(
        "--tokenizer_name", type=Path, help="a folder with a tokenizer; by default the checkpoint's, or bytes"
    )
    add("--mem_cap", type=float, default=0, help="GB of each GPU that may be used; 0 for all")
    add("--init_in_cpu", action="store_true", help="build the whole model in host memory first")


def _training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--per_device_train_batch_size", type=positive, default=8)
    add("--per_device_eval_batch_size", type=positive, default=8)
    add("--learning_rate", type=float, default=5e-5)
    add("--weight_decay", type=float, default=0.0)
    add("--num_train_epochs", type=positive, default=3)
    add("--max_train_steps", type=positive, help="stop after this many updates")
    add("--gradient_accumulation_steps", type=positive, default=1)
    add("--lr_scheduler_type", choices=SCHEDULES, default="linear")
    add("--num_warmup_steps", type=int, default=0)
    add("--seed", type=int, default=1024)
    add("--output_dir", type=Path, help="a folder for checkpoints and the trained model")
    add("--checkpointing_steps", help="a number of updates, or 'epoch': write a checkpoint that often")
    add("--resume_from_checkpoint", type=Path, help="a folder that --checkpointing_steps has written")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text}")
    return int(text)
