"""Torch reference of draft_input."""

from torch import Tensor

from eagle3_core import TorchOps


def draft_input(
    token_ids: Tensor,
    embedding: Tensor,
    x: Tensor,
    e_weight: Tensor,
    x_weight: Tensor,
    eps: float,
    tails: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The embedding of each row's token and its hidden state, normed and side by side.

    Args:
        token_ids: [R] int64 target ids. Without `tails` row r takes token r. With them row r pairs
            its state with the token AFTER it (the shift of a prefill), which is token r+1 but for
            the last row of a segment.
        embedding: [V,H].
        x: [R,H], rows may be strided.
        e_weight: [H] of the embedding's norm.
        x_weight: [H] of the state's norm.
        eps: of both norms.
        tails: [R] int64, -1 = the next row's token, else the token of this row itself.

    Returns:
        cat[norm(e), norm(x)] [R,2H], and norm(x) [R,H] for drafts with a normed residual.
    """
    if tails is not None:
        token_ids = tails.where(tails >= 0, token_ids.roll(-1))
    return TorchOps().norm_concat(embedding[token_ids], e_weight, x, x_weight, eps)
