"""Attention over paged keys and values: decoding, verifying chains and trees, and prompt chunks."""

from typing import NamedTuple

from torch import Tensor

MAX_BRANCH_ROWS = 64  # of one request whose rows are a tree: one bit each in an ancestor word


class Segments(NamedTuple):
    """Which rows of a packed batch belong to which of B requests, and where their keys lie.

    Row i of request b stands at `past[b] + i` in the order of its keys; the rows' own keys and
    values are in their slots already. Its slot is page `pages[b, j // page_size]`, place
    `j % page_size`, for the j-th key.
    """

    first_row: Tensor  # [B] int32
    num_rows: Tensor  # [B] int32
    past: Tensor  # [B] int32, keys before this pass
    pages: Tensor  # [B,P] int32
    page_size: int
    max_rows: int  # bounds num_rows, known without asking the device
    max_length: int  # bounds past + num_rows, likewise
