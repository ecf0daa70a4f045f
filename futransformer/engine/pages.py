"""The cache's pages in the engine's hands: counted references, and complete pages found again by their tokens.

A page is *blank* (nobody holds it, nothing in it is wanted), *held* (by one sequence or, if it is complete, by several)
or *kept* (nobody holds it, and its tokens can still be found). Blank ones are handed out first, then the kept one that
was let go the longest time ago.

A complete page is known by a key: a hash of the key of the page before it and of its own 64 tokens, so that one key
stands for all tokens from the beginning of a sequence. 128 bits of BLAKE2b: two texts never share one by chance.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import CachedSequence, KVCache

ROOT = b""  # what the first page's key follows


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a complete page of these tokens behind the page with key ``before`` (the first: ROOT)."""
    return blake2b(before + array("i", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Every page of a cache, for as long as the engine lives."""

    def __init__(self, cache: KVCache, *, keep: bool = True) -> None:
        """Take all pages that are free; ``keep=False``: no page outlives its sequence, and none is found."""
        self._cache = cache
        self._all = CachedSequence()  # so that whoever asks the cache itself is told that nothing is free
        cache.reserve([self._all], [cache.free_pages * PAGE_SIZE])
        self.num_pages = len(self._all.pages)
        self.keeps = keep
        self._blank = self._all.pages[::-1]
        self._kept: dict[int, None] = {}  # in the order in which they were let go
        self._holders = dict.fromkeys(self._all.pages, 0)
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._blank) + len(self._kept)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning of a chain of keys that is there; nobody's until they are held."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def unheld(self, pages: Sequence[int]) -> int:
        """How many of these pages nobody holds: what ``hold`` takes from the free ones."""
        return sum(page in self._kept for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to pages that were found."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def take(self, count: int) -> list[int] | None:
        """New pages for one holder; None, and nothing has changed, if fewer are free."""
        if count > self.free_pages:
            return None
        taken = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page = next(iter(self._kept))
                del self._kept[page]
                del self._pages[self._keys.pop(page)]
            self._holders[page] = 1
            taken.append(page)
        return taken

    def share(self, page: int, key: bytes) -> None:
        """Let a complete page be found, unless another with the same tokens already is."""
        if self.keeps and key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Take a holder away from each of a sequence's pages, the last first: a prefix's beginning is kept longest."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._keys:
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    def close(self) -> None:
        """Give all pages back to the cache."""
        self._cache.release([self._all])

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Assert that exactly these lists of pages are held, no page is lost, and none is in two states."""
        counts = dict.fromkeys(self._holders, 0)
        for pages in holders:
            assert len(set(pages)) == len(pages), "a sequence holds a page twice"
            for page in pages:
                counts[page] += 1
        assert counts == self._holders, "holders differ from what is counted"
        free = [*self._blank, *self._kept]
        assert sorted(free) == sorted(page for page, count in counts.items() if count == 0), "a free page is lost"
        assert all(self._pages[key] == page for page, key in self._keys.items())
        assert len(self._pages) == len(self._keys)
        assert set(self._kept) <= set(self._keys)
