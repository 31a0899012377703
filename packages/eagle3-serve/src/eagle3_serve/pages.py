"""Pages of slots: who holds which, and which hold a known prefix that others may share.

Target and draft use the same page numbers in stores of their own. A page whose slots are all
written is remembered by all tokens up to its end. What the draft has in slot t also depends on
token t+1, so for a draft the page is remembered by the token after it as well: one token of
lookahead, no page dropped, and no draft ever reads a slot made for another continuation.

Pages are counted, shared and never written again once they are full; a page that nobody holds stays
remembered until its memory is needed, the longest unused first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PrefixKey(NamedTuple):
    """What a page holds: the digest of all tokens up to its end, and the token after it."""

    digest: bytes
    lookahead: int | None  # None without a draft


class PagePool:
    """All pages of an engine, by reference counts."""

    def __init__(self, num_pages: int, page_size: int, has_draft: bool) -> None:
        """`has_draft` says whether the token after a page matters."""
        self.num_pages, self.page_size, self.has_draft = num_pages, page_size, has_draft
        self._holders: dict[int, int] = {}  # page -> how many hold it, at least one
        self._first_unused = 0  # pages from here on were never held
        self._blank: dict[int, None] = {}  # held once, nothing worth remembering; in order
        self._idle: OrderedDict[int, None] = OrderedDict()  # remembered, held by nobody
        self._keys: dict[int, PrefixKey] = {}
        self._remembered: dict[bytes, dict[int | None, int]] = {}  # digest -> lookahead -> page

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, remembered ones included."""
        return self.num_pages - len(self._holders)

    def is_held(self, page: int) -> bool:
        """Whether somebody holds a page."""
        return page in self._holders

    def take(self, after: int | None = None) -> int | None:
        """A page for one holder, the one behind `after` if possible; None if there is none."""
        page = self._pick(after)
        if page is not None:
            self._forget(page)
            self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held or remembered."""
        self._idle.pop(page, None)
        self._holders[page] = self._holders.get(page, 0) + 1

    def release(self, page: int) -> None:
        """One holder less."""
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            (self._idle if page in self._keys else self._blank)[page] = None

    def remember(self, page: int, key: PrefixKey) -> None:
        """Let others find a page, which from now on is not written; the first of a key stays."""
        known = self._remembered.setdefault(key.digest, {})
        if key.lookahead not in known:
            known[key.lookahead] = page
            self._keys[page] = key

    def find(self, key: PrefixKey) -> int | None:
        """The page that holds exactly this."""
        return self._remembered.get(key.digest, {}).get(key.lookahead)

    def find_tokens(self, digest: bytes) -> int | None:
        """A page that holds these tokens, whatever came after it."""
        return next(iter(self._remembered.get(digest, {}).values()), None)

    def _pick(self, after: int | None) -> int | None:
        following = -1 if after is None else after + 1
        if following in self._blank:
            del self._blank[following]
            return following
        # A neighbour keeps a request's slots in one run, which is read as it lies.
        if self._first_unused < self.num_pages:
            self._first_unused += 1
            return self._first_unused - 1
        for idle in (self._blank, self._idle):
            if idle:
                page = next(iter(idle))
                del idle[page]
                return page
        return None

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            known = self._remembered[key.digest]
            del known[key.lookahead]
            if not known:
                del self._remembered[key.digest]


class PageTable:
    """The pages of one request, in the order of its positions."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: list[int] = []
        self._digests: list[bytes] = []  # of every full page of tokens seen so far
        self._num_remembered = 0  # leading pages that were shared or handed to the pool

    @property
    def num_slots(self) -> int:
        """Positions that there is room for."""
        return len(self._pages) * self._pool.page_size

    @property
    def pages(self) -> Sequence[int]:
        """Page numbers in the order of positions."""
        return self._pages

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self._pool.page_size

    def reserve(self, num_slots: int) -> bool:
        """Make room for that many positions; False if the pool runs out, what was taken stays."""
        while self.num_slots < num_slots:
            page = self._pool.take(self._pages[-1] if self._pages else None)
            if page is None:
                return False
            self._pages.append(page)
        return True

    def release(self) -> None:
        """Give all pages back; the last ones go first, so a prefix outlives what follows it."""
        for page in reversed(self._pages):
            self._pool.release(page)
        self._pages, self._num_remembered = [], 0

    def index(self, first: int, end: int, device: torch.device) -> slice | Tensor:
        """Where positions first..end-1 lie in a store: a slice if that is one run."""
        size = self._pool.page_size
        pages = self._pages[first // size : -(-end // size)]
        start = pages[0] * size + first % size
        if pages[-1] - pages[0] == len(pages) - 1 and pages == sorted(pages):
            return slice(start, start + end - first)
        slots = torch.tensor(pages)[:, None] * size + torch.arange(size)
        skipped = first % size
        return slots.flatten()[skipped : skipped + end - first].to(device)

    def remember(self, tokens: Sequence[int], num_held: int) -> None:
        """Hand full pages to the pool: target and draft slots of `num_held` positions are right."""
        full = num_held // self._pool.page_size
        self._digest(tokens, full)
        for i in range(self._num_remembered, full):
            self._pool.remember(self._pages[i], self._key(tokens, i))
        self._num_remembered = max(self._num_remembered, full)

    def num_pages_to_take(self, tokens: Sequence[int], num_slots: int) -> int:
        """How many free pages `num_slots` positions would cost an empty table."""
        shared = sum(self._pool.is_held(page) for page in self._prefix(tokens))
        return -(-num_slots // self._pool.page_size) - shared

    def share_prefix(self, tokens: Sequence[int], copy: Callable[[int, int], None]) -> int:
        """Fill an empty table with what is known of a prefix; returns the positions held.

        At least one token is left to run. Where the tokens of a page match but not the one after
        it, or none comes after it, a copy of the page is taken without its last position: there
        alone the draft's slot would be wrong.

        Args:
            tokens: of the request.
            copy: copies a page to another in all stores.
        """
        for page in self._prefix(tokens):
            self._pool.share(page)
            self._pages.append(page)
        shared = self._num_remembered = len(self._pages)
        size = self._pool.page_size
        if size > 1 and shared < len(self._digests):
            known = self._pool.find_tokens(self._digests[shared])
            if known is not None:
                self._pool.share(known)  # taking a page must not take this one
                own = self._pool.take(self._pages[-1] if self._pages else None)
                if own is not None:
                    copy(known, own)
                    self._pages.append(own)
                self._pool.release(known)
                return (shared + 1) * size - 1 if own is not None else shared * size
        return shared * size

    def _prefix(self, tokens: Sequence[int]) -> list[int]:
        """Remembered pages that hold the first tokens, all but one at most."""
        size = self._pool.page_size
        self._digest(tokens, len(tokens) // size)
        pages = []
        for i in range((len(tokens) - 1) // size):
            page = self._pool.find(self._key(tokens, i))
            if page is None:
                break
            pages.append(page)
        return pages

    def _key(self, tokens: Sequence[int], i: int) -> PrefixKey:
        after = tokens[(i + 1) * self._pool.page_size] if self._pool.has_draft else None
        return PrefixKey(self._digests[i], after)

    def _digest(self, tokens: Sequence[int], count: int) -> None:
        size = self._pool.page_size
        for i in range(len(self._digests), count):
            before = self._digests[i - 1] if i else b""
            own = array("q", tokens[i * size : (i + 1) * size]).tobytes()
            self._digests.append(hashlib.blake2b(before + own, digest_size=16).digest())
