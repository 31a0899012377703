"""Which slots train, per chat template, by where the gradient reaches and not by any mask.

With the attention's output off, a slot's loss depends on its own aux state alone, so the slots
whose aux state has a gradient are those that train. They must predict the answers, each without its
first 1 + k tokens at step k (the target writes the first itself, before there is a chain), and
through the end of the turn.
"""

from collections.abc import Callable

import pytest
import torch

from eagle3_core import DraftConfig, Eagle3Draft
from eagle3_train.data import ChatTemplate, Conversation, to_examples
from eagle3_train.evaluate import run_slots
from eagle3_train.store import Sample
from eagle3_train.ttt import Batch, supervised_slots

STEPS = 3
EOS, END = 257, 259
CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# The end of an answer opens the next turn at once; a bos in front.
PLAIN = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'user' -%}{{ 'Q:' + m.content }}"
    "{%- else -%}{{ 'A:' + m.content + eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'A:' }}{%- endif -%}"
)
MARKED = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|im_start|>' }}"
    "{%- generation -%}{{ m.content + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}"
    "{%- else -%}{{ m.content + '\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>' }}{%- endif -%}"
)


def sample_of(template: ChatTemplate, messages: list[dict[str, str]]) -> Sample:
    (example,) = to_examples(Conversation("file:1", tuple(messages)), template)
    g = torch.Generator().manual_seed(0)
    n = len(example.input_ids)
    return Sample(
        example.input_ids,
        example.loss_mask,
        torch.randn(n, 24, generator=g),
        torch.randn(n, 8, generator=g),
        torch.zeros(n, dtype=torch.int32),
        torch.zeros(n),
    )


def slots_with_gradient(draft: Eagle3Draft, batch: Batch, step: int) -> list[int]:
    """Slots that the loss of one step of the unroll reaches."""
    batch.aux.requires_grad_()
    head = torch.randn(260, 8, generator=torch.Generator().manual_seed(1))
    only = torch.zeros(STEPS)
    only[step] = 1
    slots = supervised_slots(batch, STEPS, None, "strict")
    result, _ = run_slots(draft, batch, slots, head, only)
    (grad,) = torch.autograd.grad(result.total, batch.aux)
    return grad.abs().sum(-1).nonzero().flatten().tolist()


@pytest.mark.parametrize("source", [CHATML, PLAIN, MARKED], ids=["chatml", "plain", "marked"])
def test_the_answers_train_from_their_second_token_to_the_end_of_turn(
    make_tokenizer: Callable, chat: Callable, source: str
) -> None:
    template = ChatTemplate(make_tokenizer(source), eos_token_ids=(EOS, END))
    answers = ["good day", "x", "bye"]
    messages = chat("hi", answers[0], "one letter?", answers[1], "?", answers[2])
    sample = sample_of(template, messages)
    config = DraftConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=260, draft_vocab_size=260, target_hidden_size=8,
        num_aux_hidden_states=3, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(1), std=0.3)
    torch.nn.init.zeros_(draft.layers[0].self_attn.o_proj.weight)
    end = template.decode([EOS if source == PLAIN else END])
    ids = sample.input_ids.tolist()
    for k in range(STEPS):
        slots = slots_with_gradient(draft, Batch.pack([sample]), k)
        predicted = template.decode([ids[t + 2 + k] for t in slots])
        expected = [answer[1 + k :] + end for answer in answers if len(answer) > k]
        assert predicted == "".join(expected)
