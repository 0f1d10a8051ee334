"""What the site writes above blocks: the file that a block is of, and the command that prints an output."""

from __future__ import annotations

from collections.abc import Iterator

from docs.pages import SHELL, Block, Page, plain

FIRST, MORE, OUTPUT, OUTPUT_OF = "{}", "{}, continued", "Output", "Output of {}"
TRANSLATED = {"zh-Hans": {MORE: "{}, 续", OUTPUT: "输出", OUTPUT_OF: "{} 的输出"}}


def with_titles(page: Page, language: str) -> str:
    """The text of ``page`` with a title above every block of its script and every output."""
    lines, words = page.text.splitlines(), TRANSLATED.get(language, {})
    for block, form, name in _titles(page):
        fence = lines[block.line - 2].removesuffix(f' title="{block.title}"')
        lines[block.line - 2] = f'{fence} title="{words.get(form, form).format(name)}"'
    return "\n".join(lines) + "\n"


def _titles(page: Page) -> Iterator[tuple[Block, str, str]]:
    """Blocks, each with the form of its title and the name of a file or a command."""
    is_run = any(page.script in command.split() for command in page.commands)
    before, file, begun = "", "", False
    for block in page.blocks:
        if block.hidden or block.ignored is not None:
            continue
        if block.title == "Output":
            commands = [command for command in page.commands if file in command.split()]
            if before in SHELL or len(commands) != 1:  # the shell's block above shows the command
                yield block, OUTPUT, ""
            else:
                yield block, OUTPUT_OF, plain(commands[0])
        elif block.kind == "python":
            file = block.file or page.script
            if not block.title and is_run:
                yield block, MORE if begun else FIRST, file
                begun = True
        before = block.kind
