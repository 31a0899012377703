"""The Triton kernels as a backend: paged attention, the draft's fused ops, a standard decoder."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from eagle3_core import Eagle3Draft, UserError
from eagle3_core.draft import MLP
from eagle3_core.draft import Attention as DraftAttention
from eagle3_core.rope import is_static
from eagle3_core.target import decoder_parts
from eagle3_core.tree import TreeShape
from eagle3_serve.attention import RowContext
from eagle3_serve.draft_ops import TritonOps
from eagle3_serve.fused import is_standard
from eagle3_serve.joined import join
from eagle3_serve.kv import KVStore, Segment
from eagle3_serve.ops.tree_attention import MAX_BRANCH_ROWS
from eagle3_serve.paged import PagedContext, rows_of
from eagle3_serve.triton_decoder import TritonDecoder


class TritonBackend:
    """On a GPU, or in Triton's interpreter."""

    def context(
        self,
        store: KVStore,
        segments: Sequence[Segment],
        sliding_window: int | None = None,
        exact: bool = False,
    ) -> RowContext:
        assert not exact  # its linears are the GPU's; `TargetRunner.check_exact` refuses them
        return PagedContext(store, rows_of(segments), sliding_window)

    def decoder(self, model: PreTrainedModel, num_positions: int) -> TritonDecoder | None:
        rope = getattr(model.config, "rope_parameters", None) or {}
        if not is_standard(model) or not is_static(rope) or not _is_plain(model):
            return None
        return TritonDecoder(model, num_positions)

    def check_shape(self, shape: TreeShape) -> None:
        if shape.topk == 1:
            return
        drafted = (shape.num_speculative_tokens - 1) * shape.topk
        for name, rows in (
            ("num_verify_tokens", shape.num_nodes),
            ("(num_speculative_tokens - 1) * topk", drafted),
        ):
            if rows > MAX_BRANCH_ROWS:
                raise UserError(
                    f"{name} is {rows}, the Triton attention takes trees of up to "
                    f"{MAX_BRANCH_ROWS} rows; draft a smaller one, or use ops 'reference'"
                )

    def prepare(self, draft: Eagle3Draft, num_positions: int) -> None:
        draft.ops = TritonOps()
        for module in draft.modules():
            if isinstance(module, DraftAttention):
                join((module.q_proj, module.k_proj, module.v_proj))
            if isinstance(module, MLP):
                join((module.gate_proj, module.up_proj))
        if is_static(draft.config.rope_parameters):
            draft.tabulate_rope(num_positions)


def _is_plain(model: PreTrainedModel) -> bool:
    """Whether nobody has replaced the linears of its layers."""
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    layers = decoder_parts(model).layers
    return all(type(layer.get_submodule(n)) is nn.Linear for layer in layers for n in names)
