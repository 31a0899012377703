"""From the verify rows' logits to the tokens of the round, whatever the sampling parameters are."""

from typing import NamedTuple

from torch import Tensor


class Processing(NamedTuple):
    """Sampling parameters of a batch: B requests, N nodes a request, V vocabulary.

    The order of application is `SamplingParams`': bias, penalties over what has been used (prompt
    and output for `repetition`, the output for the others; a node's own path counts as output),
    mask, temperature, top_k, top_p, min_p. At the border of top_k and top_p the lower of equally
    likely ids is kept.
    """

    temperature: Tensor  # [B] fp32, 0 = greedy
    top_k: Tensor  # [B] int32, 0 = off
    top_p: Tensor  # [B] fp32, 1 = off
    min_p: Tensor  # [B] fp32, 0 = off
    bias: Tensor | None = None  # [B,V] fp32
    penalties: Tensor | None = None  # [B,3] fp32: repetition, presence, frequency
    counts: Tensor | None = None  # [B,V] int32 in the output so far; given with penalties
    in_prompt: Tensor | None = None  # [B,V] bool; given with penalties
    mask: Tensor | None = None  # [B,N,ceil(V/32)] int32, bit v%32 of word v//32 = v is allowed


class Verified(NamedTuple):
    """What a round emits. `num_accepted + 1` entries of a row count, -1 and 0 stand behind them."""

    num_accepted: Tensor  # [B] int64
    path: Tensor  # [B,depth+1] int64, accepted nodes with the root
    token_ids: Tensor  # [B,depth+1] int64: the accepted tokens, then the bonus
    log_probs: Tensor  # [B,depth+1] fp32, under the law that the token was taken from
