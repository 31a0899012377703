"""Whether a draft belongs to a target: the sizes that both state must be the same."""

from eagle3_core.config import DraftConfig
from eagle3_core.errors import UserError


def check_pair(
    where: object,
    config: DraftConfig,
    target: str,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
) -> None:
    """Refuse a draft that was made for another target.

    Args:
        where: the draft's file or folder, for the message.
        config: of the draft. A draft that does not state its target's depth fits any.
        target: its name, for the message.
        vocab_size: V, rows of the target's lm_head.
        hidden_size: T.
        num_layers: of the target.

    Raises:
        UserError: names the first size that differs.
    """
    for name, ours, theirs in (
        ("vocab_size", config.vocab_size, vocab_size),
        ("target_hidden_size", config.target_hidden_size, hidden_size),
        ("num_target_layers", config.num_target_layers or num_layers, num_layers),
    ):
        if ours != theirs:
            raise UserError(
                f"{where}: {name} is {ours}, but target {target} has {theirs}; "
                "the draft belongs to another target"
            )
