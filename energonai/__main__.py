"""``python -m energonai``."""

from energonai.cli import main

main()
