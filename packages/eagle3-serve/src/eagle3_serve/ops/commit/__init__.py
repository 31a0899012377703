"""What a round leaves behind: accepted keys and values in a row, and the draft's next input."""

from typing import NamedTuple

from torch import Tensor


class Committed(NamedTuple):
    """The accepted rows of B requests, root included: what the draft reads next, packed.

    Of K + 1 rows a request, the first `num_rows` count. The others are padding that can be run:
    token 0 at position 0, a state of zeros, no slot.
    """

    aux: Tensor  # [B,K+1,W] the rows' states
    tokens: Tensor  # [B,K+1] int64, the token AFTER each row: the last one's is the bonus
    positions: Tensor  # [B,K+1] int32
    slots: Tensor  # [B,K+1] int64, where the draft's keys and values go; -1 = nowhere
    num_rows: Tensor  # [B] int32, num_accepted + 1
    last_row: Tensor  # [B] int64 of B·(K+1), the one that says what comes after the bonus
    past: Tensor  # [B] int32, keys before these rows
