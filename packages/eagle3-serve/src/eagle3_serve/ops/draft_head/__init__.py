"""The draft's norm, head, top-k and log-sum-exp, without logits in memory."""

from typing import NamedTuple

from torch import Tensor


class Proposals(NamedTuple):
    """The k most likely tokens of each row, most likely first; of equal ones the lower id first."""

    token_ids: Tensor  # [R,k] int64, the target's ids
    draft_ids: Tensor  # [R,k] int64
    log_probs: Tensor  # [R,k] fp32, under the draft's own softmax at temperature 1
