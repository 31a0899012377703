"""One training step of speculators 0.9.0 on its own draft; flex attention where there is a GPU."""

from collections.abc import Callable

import torch
from case import EPS, ROPE, STEP_WEIGHT, Case
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from torch import Tensor
from transformers import LlamaConfig


def build(case: Case, _: str) -> Callable[[], Tensor]:
    """A function that runs forward and backward and returns the loss."""
    on_gpu = case.device.type == "cuda"
    sizes = dict(case.sizes)
    draft_vocab_size = sizes.pop("draft_vocab_size")
    layer = LlamaConfig(
        **sizes,
        num_hidden_layers=1,
        rms_norm_eps=EPS,
        max_position_embeddings=max(2048, len(case.ids)),
        rope_parameters=ROPE,
    )
    layer._attn_implementation = "simple_flex_attention" if on_gpu else "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=draft_vocab_size
    )
    model = Eagle3DraftModel(config)
    kept = case.weights["t2d"].bool()
    weights = {
        **case.weights,
        "verifier_lm_head.weight": case.head[kept],
        "verifier_norm.weight": torch.ones(case.sizes["hidden_size"]),
    }
    model.load_state_dict(weights)
    model.to(case.device)
    loss = resolve_loss_config("kl_div", "fused" if on_gpu else "eager")
    # The target's state after a norm of unit weight passes through the same norm unchanged.
    batch = {
        "hidden_states": case.aux[None, :-1],
        "input_ids": case.ids[None, 1:],
        "document_ids": torch.zeros_like(case.ids)[None, 1:],
        "loss_mask": case.loss_mask[None, 1:],
        "position_ids": torch.arange(1, len(case.ids), device=case.device)[None],
        "verifier_last_hidden_states": case.final[None, 1:],
    }

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with case.autocast():
            _, total, _ = model(
                **batch,
                ttt_steps=case.ttt_length,
                ttt_step_loss_decay=STEP_WEIGHT,
                loss_config=loss,
            )
        total.backward()
        return total.detach()

    return step
