"""Templates in the manner of real ones: what is supervised follows the prompt a server renders."""

import time

import pytest

from eagle3_core import UserError
from eagle3_train.data import ChatTemplate, Conversation, Example, Unusable, to_examples

IM_END = 259
ASSISTANT = "<|im_start|>assistant\n"
# Qwen3: thinking is shown from the last question on, and an empty one put before the last answer.
QWEN3 = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set content = m.content -%}{%- set reasoning = m.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or reasoning) -%}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content + '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}
"""
# DeepSeek-R1: no thinking is ever shown; the prompt opens it.
DEEPSEEK = """
{{- bos_token -}}{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<User>' + m.content -}}
{%- elif m.role == 'assistant' -%}
{{- '<Assistant>' + m.content.split('</think>')[-1] + '<|im_end|>' -}}
{%- else -%}{{- m.content -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<Assistant><think>\\n' -}}{%- endif -%}
"""
# gpt-oss: channels; the last answer ends with another token than those before it, calls with a
# third, and only the last shows its analysis.
HARMONY = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if m.thinking and loop.last -%}
{{- '<|im_start|>assistant<analysis>' + m.thinking + '<end>' -}}{%- endif -%}
{%- if m.tool_calls -%}
{{- '<|im_start|>assistant to=' + m.tool_calls[0].function.name + m.content + '<|bos|>' -}}
{%- elif loop.last -%}{{- '<|im_start|>assistant<final>' + m.content + '<|im_end|>' -}}
{%- else -%}{{- '<|im_start|>assistant<final>' + m.content + '<end>' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '<text>' + m.content + '<end>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}{%- endif -%}
"""
# Llama 3: the system turn carries the date.
LLAMA3 = """
{%- if not date_string is defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}
{{- bos_token + '<|im_start|>system\\nToday: ' + date_string + '<|im_end|>' -}}
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n\\n' + m.content|trim + '<|im_end|>' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n\\n' -}}{%- endif -%}
"""


def _template(make_tokenizer, source: str, **arguments: object) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(source), eos_token_ids=(256, IM_END), arguments=arguments)


def _split(example: Example, template: ChatTemplate) -> list[str]:
    """Text of alternating runs; the first is unsupervised."""
    ids, mask = example.input_ids.tolist(), example.loss_mask.tolist()
    runs: list[list[int]] = [[]]
    for i, token in enumerate(ids):
        if mask[i] != (len(runs) % 2 == 0):
            runs.append([])
        runs[-1].append(token)
    return [template.decode(run) for run in runs]


def _row(messages: list[dict], **more: object) -> Conversation:
    return Conversation("file:1", tuple(messages), **more)


def _prompt(template: ChatTemplate, messages: list[dict]) -> str:
    return template.render(messages, open_answer=True)


THOUGHT = ("q1", "<think>\nhm\n</think>\n\na1", "q2", "<think>\nso\n</think>\n\na2")


def test_thinking_that_history_loses_makes_an_example_an_answer(make_tokenizer, chat) -> None:
    template, messages = _template(make_tokenizer, QWEN3), chat(*THOUGHT)
    first, second = to_examples(_row(messages), template)
    assert _split(first, template) == [
        _prompt(template, messages[:1]), THOUGHT[1] + "<|im_end|>", "\n"
    ]  # fmt: skip
    prompt = _prompt(template, messages[:3])
    assert "hm" not in prompt
    assert _split(second, template) == [prompt, THOUGHT[3] + "<|im_end|>", "\n"]
    assert [first.where, second.where] == ["file:1 (part 1)", "file:1 (part 2)"]


def test_thinking_is_supervised_as_it_was_written(make_tokenizer, chat) -> None:
    """The template would put other line breaks around it."""
    template, messages = _template(make_tokenizer, QWEN3), chat("q", "<think>hm</think>a")
    (example,) = to_examples(_row(messages), template)
    prompt = _prompt(template, messages[:1])
    assert _split(example, template) == [prompt, "<think>hm</think>a<|im_end|>", "\n"]


def test_thinking_in_a_field_of_its_own(make_tokenizer, chat) -> None:
    template, messages = _template(make_tokenizer, QWEN3), chat("q1", "a1", "q2", "a2")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "hm", "so"
    written = [_split(example, template)[1] for example in to_examples(_row(messages), template)]
    assert written == [
        "<think>\nhm\n</think>\n\na1<|im_end|>", "<think>\nso\n</think>\n\na2<|im_end|>"
    ]  # fmt: skip
    silent = _template(make_tokenizer, LLAMA3, date_string="1")
    with pytest.raises(Unusable, match="does not render the reasoning_content of an answer"):
        to_examples(_row(messages), silent)


def test_steps_of_one_answer_share_a_text(make_tokenizer) -> None:
    """Between two questions Qwen3 keeps the thinking: call, result and answer are one example."""
    template = _template(make_tokenizer, QWEN3)
    texts = ["q", "<think>\nlook\n</think>\n\ncall", "12", "<think>\nso\n</think>\n\n12 degrees"]
    roles = ["user", "assistant", "tool", "assistant"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, texts, strict=True)]
    (example,) = to_examples(_row(messages), template)
    written = _split(example, template)[1::2]
    assert written == [texts[1] + "<|im_end|>", texts[3] + "<|im_end|>"]


def test_arguments_reach_the_template(make_tokenizer, chat) -> None:
    template, messages = _template(make_tokenizer, QWEN3, enable_thinking=False), chat("q", "a")
    (example,) = to_examples(_row(messages), template)
    prompt, answer, _ = _split(example, template)
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    assert answer == "a<|im_end|>"
    with pytest.raises(UserError, match="has no 'enable_thinkng'"):
        _template(make_tokenizer, QWEN3, enable_thinkng=False)


@pytest.mark.parametrize("answer", ["hm</think>a", "<think>\nhm</think>a"])
def test_thinking_that_is_never_shown_is_put_back(make_tokenizer, chat, answer: str) -> None:
    template = _template(make_tokenizer, DEEPSEEK)
    messages = chat("q1", answer, "q2", answer)
    examples = to_examples(_row(messages), template)
    prompts = [_prompt(template, messages[:1]), _prompt(template, messages[:3])]
    assert prompts[1].endswith("<Assistant>a<|im_end|><User>q2<Assistant><think>\n")
    assert [_split(e, template) for e in examples] == [
        [prompt, "hm</think>a<|im_end|>"] for prompt in prompts
    ]


def test_an_answer_otherwise_opened_is_refused(make_tokenizer, chat) -> None:
    """The prompt opens a thinking that these answers do not have."""
    with pytest.raises(Unusable, match="opens an answer otherwise than it renders it"):
        to_examples(_row(chat("q", "a")), _template(make_tokenizer, DEEPSEEK))


def test_channels_and_their_endings(make_tokenizer, chat) -> None:
    template, messages = _template(make_tokenizer, HARMONY), chat("q1", "a1", "q2", "a2")
    messages[1]["thinking"], messages[3]["thinking"] = "hm", "so"
    examples = to_examples(_row(messages), template)
    assert [_split(e, template)[1] for e in examples] == [
        "<analysis>hm<end><|im_start|>assistant<final>a1<|im_end|>",
        "<analysis>so<end><|im_start|>assistant<final>a2<|im_end|>",
    ]
    assert "<final>a1<end>" in _split(examples[1], template)[0]


def test_a_call_may_end_with_another_token(make_tokenizer) -> None:
    template = ChatTemplate(make_tokenizer(HARMONY), eos_token_ids=(IM_END,))
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "{}", "tool_calls": [{"function": {"name": "look"}}]},
    ]
    with pytest.raises(Unusable, match="ends an answer in an unusual way"):
        to_examples(_row(messages), template)  # <|bos|> is not an end-of-turn id of the target
    template = ChatTemplate(make_tokenizer(HARMONY), eos_token_ids=(256, IM_END))
    (example,) = to_examples(_row(messages), template)
    assert _split(example, template)[1] == " to=look{}<|bos|>"


def test_a_cut_answer_of_a_rewriting_template(make_tokenizer, chat) -> None:
    template, messages = _template(make_tokenizer, HARMONY), chat("q1", "a1", "q2", "a2")
    examples = to_examples(_row(messages, finish_reason="length"), template)
    assert [_split(e, template)[1] for e in examples] == ["<final>a1<|im_end|>", "<final>a2"]


def test_the_date_is_noticed_and_can_be_fixed(make_tokenizer, chat) -> None:
    today = time.strftime("%d %b %Y")
    template = _template(make_tokenizer, LLAMA3)
    assert template.writes_the_date
    (example,) = to_examples(_row(chat("q", " a ", "r", "b")), template)
    parts = _split(example, template)
    assert parts[0].startswith(f"<|bos|><|im_start|>system\nToday: {today}<|im_end|>")
    assert parts[1::2] == ["a<|im_end|>", "b<|im_end|>"]
    fixed = _template(make_tokenizer, LLAMA3, date_string="26 Jul 2024")
    assert not fixed.writes_the_date
    assert "26 Jul 2024" in fixed.render(chat("q"))


def test_markers_of_a_template_that_rewrites_history(make_tokenizer, chat) -> None:
    """Supervised is what the target wrote, not what the template made of it since."""
    marked = QWEN3.replace(
        "{{- '<|im_start|>assistant\\n' -}}\n{%- if loop",
        "{{- '<|im_start|>assistant\\n' -}}{%- generation -%}\n{%- if loop",
    )
    marked = marked.replace(
        "{{- content + '<|im_end|>\\n' -}}",
        "{{- content + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}",
    )
    assert "{%- generation -%}" in marked
    assert "{%- endgeneration -%}" in marked
    left, right = (_template(make_tokenizer, source) for source in (marked, QWEN3))
    assert (left.marks_answers, right.marks_answers) == (True, False)
    for texts in (THOUGHT, THOUGHT[:2], ("q", "a")):
        row = _row(chat(*texts))
        pairs = zip(to_examples(row, left), to_examples(row, right), strict=True)
        for own, other in pairs:
            assert own.input_ids.equal(other.input_ids)
            assert own.loss_mask.equal(other.loss_mask)


def test_every_prompt_is_the_one_a_server_renders(make_tokenizer, chat) -> None:
    cases = [(QWEN3, THOUGHT), (DEEPSEEK, ("q", "x</think>y")), (HARMONY, ("q", "a", "r", "b"))]
    for source, texts in cases:
        template, messages = _template(make_tokenizer, source), chat(*texts)
        for number, example in enumerate(to_examples(_row(messages), template)):
            served = template.tokenizer.apply_chat_template(
                messages[: 2 * number + 1], add_generation_prompt=True, return_dict=False
            )
            start = int(example.loss_mask.nonzero()[0])
            assert example.input_ids[:start].tolist() == served
