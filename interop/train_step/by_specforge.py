"""One training step of SpecForge 0.2.0 on its own draft; flex attention where there is a GPU."""

from collections.abc import Callable

import torch
from case import EPS, ROPE, STEP_WEIGHT, Case
from specforge.algorithms.eagle3 import model as eagle3_model
from specforge.core.loss import _compute_loss
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.utils import padding
from torch import Tensor
from transformers import LlamaConfig


class _EagerLoss:
    """Its own torch reference for its Triton kernel, which a CPU would have to interpret."""

    apply = staticmethod(_compute_loss)


def build(case: Case, _: str) -> Callable[[], Tensor]:
    """A function that runs forward and backward and returns the loss."""
    backend = "flex_attention" if case.device.type == "cuda" else "sdpa"
    if case.device.type == "cpu":
        eagle3_model.LogSoftmaxLoss = _EagerLoss
    config = LlamaConfig(
        **case.sizes,
        num_hidden_layers=1,
        rms_norm_eps=EPS,
        max_position_embeddings=max(2048, len(case.ids)),
        rope_parameters=ROPE,
        pad_token_id=0,
    )
    draft = LlamaForCausalLMEagle3(config, attention_backend=backend)
    draft.load_state_dict({n.replace("layers.0.", "midlayer."): t for n, t in case.weights.items()})
    draft.to(case.device)
    draft.freeze_embedding()
    model = eagle3_model.OnlineEagle3Model(draft, length=case.ttt_length, attention_backend=backend)

    # Tokens and teacher one slot earlier, zeros behind them and no loss there, as its data loader
    # does; the mask stays where it is.
    loss_mask = case.loss_mask.long()
    loss_mask[-1] = 0
    batch = {
        "input_ids": padding(case.ids[None], left=False),
        "attention_mask": torch.ones_like(case.ids)[None],
        "loss_mask": loss_mask[None, :, None],
        "hidden_states": case.aux[None],
    }
    final = padding(case.final[None], left=False)

    def step() -> Tensor:
        draft.zero_grad(set_to_none=True)
        with case.autocast():
            with torch.no_grad():
                target = final @ case.head.T
            losses = model(target=target, **batch)[0]
        del target
        total = sum(STEP_WEIGHT**k * loss for k, loss in enumerate(losses))
        total.backward()
        return total.detach()

    return step
