"""``python -m docs.build [--serve PORT]``: the site in all languages, ``site/VERSION/LANGUAGE/``."""

from __future__ import annotations

import argparse
import functools
import http.server
import logging
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

from docs import sidebar
from docs.pages import LANGUAGES, ROOT

SITE = ROOT / "site"
_FIRST = """<!doctype html>
<meta charset="utf-8">
<title>colossalai</title>
<meta http-equiv="refresh" content="0; url={target}">
<a href="{target}">colossalai</a>
"""


def build_site(site: Path = SITE, strict: bool = True) -> None:
    """Build every language of this version, and a first page that leads to the English one."""
    version = sidebar.versions()[0]
    for language in LANGUAGES:
        name = "mkdocs.yml" if language == "en" else f"mkdocs.{language}.yml"
        config = load_config(str(ROOT / name), site_dir=str(site / version / language), strict=strict)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()
    (site / "index.html").write_text(_FIRST.format(target=f"{version}/en/index.html"))


def serve(port: int) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.build", description=__doc__)
    parser.add_argument("--serve", type=int, metavar="PORT", help="show the site on this port; 0: a free one")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # jieba, which cuts Chinese words for the search, tells every step, whatever level it is given before
    logging.getLogger("jieba").addFilter(lambda record: record.levelno >= logging.WARNING)
    build_site()
    print(f"built {SITE / 'index.html'}", flush=True)
    if options.serve is not None:
        serve(options.serve)


if __name__ == "__main__":
    main()
