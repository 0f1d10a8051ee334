"""A service by a config: ranks, batches, cache, and ``/generation`` on one port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colossalai.serving import AsyncEngine, BatchManagerForGeneration, ListCache, launch_engine
from colossalai.serving.engine import launch_job
from colossalai.serving.loading import open_tokenizer
from colossalai.serving.worker import Job
from energonai.context.config import ConfigError, ServiceConfig


def launch_service(config: ServiceConfig, announce: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from colossalai.serving.http import Settings
    from colossalai.serving.http.engine_app import EngineText, serve_engine
    from colossalai.serving.http.server import bind

    settings = Settings(
        host=config.server_host,
        port=config.server_port,
        keep_alive=config.timeout_keep_alive,
        allow_origins=("*",) if config.allow_cors else (),
        log_level=config.log_level,
    )
    sock = bind(settings)
    try:
        tokenizer = open_tokenizer(config.tokenizer_path, known=True)
        cache = None
        if config.cache_size or config.fixed_cache_keys:
            fixed = [tuple(key) for key in config.fixed_cache_keys]
            cache = ListCache(config.cache_size, config.cache_list_size, fixed)
        own = config.engine_server
        if own is None or own is launch_engine:  # the config names what is the default
            engine = launch_config_engine(config, tokenizer)
        else:
            engine = own(**config.arguments_of(own))
            if not isinstance(engine, AsyncEngine):
                raise ConfigError(
                    f"engine_server={own.__name__} returned {engine!r:.60}; it returns an AsyncEngine, as"
                    " launch_engine does, or leave it out"
                )
    except BaseException:
        sock.close()
        raise
    text = EngineText(engine, tokenizer, cache, [tuple(key) for key in config.fixed_cache_keys])
    host = "localhost" if config.server_host == "0.0.0.0" else config.server_host
    serve_engine(
        text, settings, sock, announce=lambda: announce(f"listening on http://{host}:{sock.getsockname()[1]}")
    )


def launch_config_engine(config: ServiceConfig, tokenizer: Any) -> AsyncEngine:
    """The engine that a config without ``engine_server`` has."""
    kwargs = {"checkpoint": config.checkpoint, "half": config.half, **config.model_kwargs}
    pad = tokenizer.pad_token_id
    return launch_job(
        Job(
            _forward(),
            {"model_fn": config.model_class, "model_kwargs": kwargs},
            tp=config.tp_init_size,
            pp=config.pp_init_size,
            port=config.port,
            backend=config.backend,
            seed=config.seed,
        ),
        BatchManagerForGeneration(config.executor_max_batch_size, 0 if pad is None else pad),
        queue_size=config.executor_max_queue_size,
        verbose=config.verbose,
    )


def _forward() -> Any:
    from colossalai.serving.forward import BatchForward

    return BatchForward
