"""``colossalai serve``: from a folder to an HTTP endpoint."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import click

_POSITIVE = click.IntRange(min=1)


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --max_length works too
    }
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--tp", "--tensor-parallel-size", type=_POSITIVE, default=1, help="Ranks that share every layer."
)
@click.option("--pp", "--pipeline-parallel-size", type=_POSITIVE, default=1, help="Stages of a pipeline.")
@click.option("--host", default="127.0.0.1", help="Where to listen; 0.0.0.0: on all networks.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0: one of the system's choice.")
@click.option(
    "--name", "--served-model-name", help="What clients call the model.  [default: the name of the folder]"
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A folder.  [default: that of the model]")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="[default: that of the weights]",
    show_default=False,
)
@click.option(
    *("--max-length", "--max-model-len"),
    type=_POSITIVE,
    help="Tokens of a prompt and its answer together.  [default: all]",
)
@click.option("--max-requests", type=_POSITIVE, default=64, help="Requests that are computed at once.")
@click.option(
    "--queue-size", type=click.IntRange(min=0), default=256, help="Requests that may wait beside them."
)
@click.option("--pages", type=_POSITIVE, help="Pages of the cache of keys and values.  [default: what fits]")
@click.option("--exact", is_flag=True, help="The same answers whatever else is computed at the time.")
@click.option(
    "--api-key",
    envvar="COLOSSALAI_API_KEY",
    help=(
        "What clients must send; better set in the environment (COLOSSALAI_API_KEY), where `ps` does"
        " not show it."
    ),
    show_default=False,
)
@click.option(
    "--chat-template", type=click.Path(path_type=Path), help="A file, in place of the tokenizer's own."
)
@click.option("--max-body", type=_POSITIVE, default=1 << 20, help="Bytes of a request.")
@click.option("--max-choices", type=_POSITIVE, default=64, help="Answers to one request: prompts times n.")
@click.option(
    "--body-timeout", type=click.FloatRange(min=0.1), default=20.0, help="Seconds for a request to arrive."
)
@click.option(
    "--request-timeout", type=click.FloatRange(min=0.1), default=600.0, help="Seconds for an answer."
)
@click.option(
    "--drain", type=click.FloatRange(min=0), default=30.0, help="Seconds for answers after SIGTERM."
)
@click.option(
    "--patience", type=click.FloatRange(min=1), default=120.0, help="Seconds after which silent ranks hang."
)
@click.option(
    "--restarts", type=click.IntRange(min=0), default=3, help="Restarts of the ranks in ten minutes."
)
@click.option("--allow-origin", "allow_origins", multiple=True, help="A page's host that may call us (CORS).")
@click.option(
    "--log-level", type=click.Choice(["critical", "error", "warning", "info", "debug"]), default="error"
)
def serve(model: Path, **options: Any) -> None:
    """Serve the model in the folder MODEL over HTTP, until SIGTERM or Ctrl-C.

    MODEL is a folder as save_pretrained writes it: config.json, safetensors, a tokenizer. Every rank reads
    its own part. A browser finds a page to try the model at /, and all routes at /docs.

    \b
      colossalai serve my-opt
      colossalai serve my-llama --tp 4 --pp 2 --dtype bf16 --host 0.0.0.0
      curl localhost:8000/v1/completions -H 'content-type: application/json' \\
          -d '{"prompt": "Hello", "max_tokens": 16}'

    A rank that dies or hangs fails the requests of the moment with its reason, and all ranks start anew.
    """
    try:
        from colossalai.serving.errors import ServiceError
        from colossalai.serving.http import Settings
        from colossalai.serving.http.server import bind
        from colossalai.serving.loading import FolderError
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    picked = {name: options.pop(name) for name in list(options) if name in Settings.__dataclass_fields__}
    try:
        settings = Settings(**picked)
        with contextlib.closing(bind(settings)) as sock:
            failed = _serve(model, settings, sock, options)
    except (ServiceError, FolderError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(1 if failed else 0)


def _serve(path: Path, settings: Any, sock: socket.socket, options: dict[str, Any]) -> bool:
    """Whether the service ended by itself."""
    from colossalai.serving import Generation, Job, Service, TextModel
    from colossalai.serving.http import serve as serve_http
    from colossalai.serving.loading import inspect_folder

    template = None if options["chat_template"] is None else options["chat_template"].read_text()
    tokenizer = options["tokenizer"]
    folder = inspect_folder(
        path, tp=options["tp"], pp=options["pp"], tokenizer=tokenizer, max_length=options["max_length"]
    )
    build = {
        "path": str(path),
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "dtype": options["dtype"],
        "max_requests": options["max_requests"],
        "max_length": folder.max_length,
        "pages": options["pages"],
        "exact": options["exact"],
    }
    service = Service(
        Job(Generation, {"build": _build, "options": build}, tp=options["tp"], pp=options["pp"]),
        limit=options["max_requests"] + options["queue_size"],
        restarts=options["restarts"],
        patience=options["patience"],
    )
    name = options["name"] or path.resolve().name
    ranks = "1 rank" if service.job.ranks == 1 else f"{service.job.ranks} ranks"
    click.echo(f"loading {path} on {ranks}", err=True)
    service.start()
    model = TextModel(
        service, folder.tokenizer, max_length=folder.max_length, name=name, chat_template=template
    )
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        serve_http(
            model,
            settings,
            sock,
            announce=lambda: click.echo(f"listening on http://{host}:{sock.getsockname()[1]}"),
        )
        return service.state == "ended"
    finally:
        service.close()


def _build(**options: Any) -> Any:
    from colossalai.serving.loading import build_generator

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return build_generator(**options)
