"""The draft's head fused with the loss."""

from eagle3_train.ops.head_loss.reference import HeadLoss, head_loss

__all__ = ["HeadLoss", "head_loss"]
