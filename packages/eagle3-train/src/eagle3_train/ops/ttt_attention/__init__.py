"""Attention of one step of the training-time-test unroll."""

from eagle3_train.ops.ttt_attention.reference import Visible, ttt_attention

__all__ = ["Visible", "ttt_attention"]
