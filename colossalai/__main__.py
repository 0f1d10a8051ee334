"""``python -m colossalai`` is the ``colossalai`` command."""

from colossalai.cli import main

if __name__ == "__main__":
    main(prog_name="colossalai")
