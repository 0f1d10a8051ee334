"""``energonai service init --config_file=opt_config.py``."""

from __future__ import annotations

from pathlib import Path

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The older name of `colossalai serve`, with a config file."""


@cli.group()
def service() -> None:
    """A model behind HTTP."""


@service.command()
@click.option(
    "--config_file", "--config-file", type=click.Path(path_type=Path), required=True, help="A .py file."
)
def init(config_file: Path) -> None:
    """Start the service that the config file describes; it runs until SIGTERM or Ctrl-C."""
    try:
        from energonai.context.config import ServiceConfig
        from energonai.service import launch_service

        config = ServiceConfig.from_file(config_file)
        click.echo("*** Energon Init Configurations: ***")
        click.echo("\n".join(config.lines()))
        launch_service(config, click.echo)
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error


def main() -> None:
    """The console script ``energonai``."""
    cli(prog_name="energonai")


if __name__ == "__main__":
    main()
