"""Pages: who holds them, and which contents can be found again.

A page is held by the requests whose tokens it has.  When none holds it any more, its contents rest until the
page is needed for others, the longest unused first; a request that begins with the same tokens takes it up
again.  Contents are known by all tokens up to the end of the page: by those of the page, and the contents of
the page before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Content = tuple[int, tuple[int, ...]]
"""The number of the contents of the page before (0 for none), and the tokens of a page."""


class PagePool:
    """The pages of one generator, by their numbers."""

    def __init__(self, count: int, page_size: int, *, reuse: bool = True) -> None:
        self.count, self.page_size, self.reuse = count, page_size, reuse
        self._holders = [0] * count
        self._blank = list(range(count - 1, -1, -1))
        self._resting: OrderedDict[int, None] = OrderedDict()
        self._pages: dict[Content, int] = {}
        self._contents: dict[int, Content] = {}  # of pages that can be found
        self._numbers: dict[int, int] = {}  # of the contents of a page, whether it can be found or not
        self._last_number = 0

    @property
    def free(self) -> int:
        """How many pages no request holds."""
        return len(self._blank) + len(self._resting)

    def take(self) -> int | None:
        """A page for new contents; None if all are held."""
        if self._blank:
            page = self._blank.pop()
        elif self._resting:
            page, _ = self._resting.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Take up the pages whose contents ``tokens`` begin with, all but the last token at most."""
        found: list[int] = []
        before, size = 0, self.page_size
        for start in range(0, (len(tokens) - 1) // size * size if self.reuse else 0, size):
            page = self._pages.get((before, tuple(tokens[start : start + size])))
            if page is None:
                break
            before = self._numbers[page]
            self._resting.pop(page, None)
            self._holders[page] += 1
            found.append(page)
        return found

    def note(self, page: int, before: int | None, tokens: Sequence[int]) -> None:
        """Say that ``page`` will have all of its tokens, after those of the page ``before``."""
        if not self.reuse or (before is not None and before not in self._numbers):
            return
        content = (0 if before is None else self._numbers[before], tuple(tokens))
        twin = self._pages.get(content)
        if twin is not None:
            self._numbers[page] = self._numbers[twin]
            return
        self._last_number += 1
        self._pages[content], self._contents[page] = page, content
        self._numbers[page] = self._last_number

    def release(self, pages: Sequence[int], *, forget: bool = False) -> None:
        """Let go of pages that one request has held; with ``forget`` nothing in them is used again."""
        for page in reversed(pages):  # the end of a text is the first to go
            if forget:
                self._forget(page)
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._contents:
                    self._resting[page] = None
                else:
                    self._numbers.pop(page, None)
                    self._blank.append(page)

    def forget_all(self) -> None:
        """No contents are found any more: the weights that made them have changed."""
        for page in list(self._contents):
            self._forget(page)
        self._numbers.clear()
        self._blank += reversed(self._resting)
        self._resting.clear()

    def _forget(self, page: int) -> None:
        content = self._contents.pop(page, None)
        self._numbers.pop(page, None)
        if content is not None:
            del self._pages[content]
