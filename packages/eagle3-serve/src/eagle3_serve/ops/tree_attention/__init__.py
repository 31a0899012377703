"""Attention over paged keys and values: decoding, verifying chains and trees, and prompt chunks."""

from typing import NamedTuple

from torch import Tensor

MAX_BRANCH_ROWS = 64  # of one request whose rows are a tree: one bit each in an ancestor word


class Segments(NamedTuple):
    """Which rows of a packed batch belong to which of B requests, and where their keys lie.

    Row i of request b stands at `past[b] + grown + i` in the order of its keys; the rows' own keys
    and values are in their slots already. The slot of the j-th key is place `j % page_size` of page
    `pages[b, j // page_size]`; a page of -1 is none.
    """

    first_row: Tensor  # [B] int32
    num_rows: Tensor  # [B] int32
    past: Tensor  # [B] int32, keys that every row may see
    pages: Tensor  # [B,P] int32
    page_size: int
    max_rows: int  # bounds num_rows, known without asking the device
    max_length: int  # bounds past + grown + num_rows, likewise
    grown: int = 0  # keys behind those: levels of the request's tree that earlier passes wrote

    def slots(self, places: Tensor) -> Tensor:
        """[B,m] int64 places in the order of the keys -> their slots; -1 where there is no page."""
        number = places // self.page_size
        inside = number < self.pages.shape[1]
        page = self.pages.long().gather(1, number.where(inside, 0))
        slot = page * self.page_size + places % self.page_size
        return slot.where(inside & (page >= 0), -1)
