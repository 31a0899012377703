"""Supervised is what the target writes itself: answers through end-of-turn, and nothing else."""

from typing import Any

import pytest

from eagle3_core import UserError
from eagle3_train.data import ChatTemplate, Conversation, Example, Unusable, to_examples

BOS, EOS, IM_START, IM_END = range(256, 260)
MARKED = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
    "{%- generation -%}{{ m.content + BODY }}{%- endgeneration -%}{{ REST }}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
TOOLS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for c in m.tool_calls or [] -%}{{ '<call>' + c.function.name }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# One bos, users and assistants in turn, no system.
STRICT = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'system' -%}"
    "{{ raise_exception('no system turn in this template') }}{%- endif -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('turns must alternate') }}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
LONG_CHAT = ("hi", "hello\nthere 😀", "and?", "", "again", "<|x|> bye ")


def _supervised(example: Example, template: ChatTemplate) -> list[str]:
    """Text of each run of supervised tokens."""
    runs: list[list[int]] = []
    ids, mask = example.input_ids.tolist(), example.loss_mask.tolist()
    for i, token in enumerate(ids):
        if mask[i]:
            if not i or not mask[i - 1]:
                runs.append([])
            runs[-1].append(token)
    return [template.decode(run) for run in runs]


def to_example(row: Conversation, template: ChatTemplate) -> Example:
    (example,) = to_examples(row, template)
    return example


def _row(messages: list[dict[str, Any]], **more: Any) -> Conversation:
    return Conversation("file:1", tuple(messages), **more)


def _text(text: str, **more: Any) -> Conversation:
    return Conversation("file:1", text=text, **more)


def test_answers_and_their_end_of_turn_only(chatml: ChatTemplate, chat) -> None:
    example = to_example(_row(chat(*LONG_CHAT)), chatml)
    assert _supervised(example, chatml) == [
        "hello\nthere 😀<|im_end|>",
        "<|im_end|>",
        "<|x|> bye <|im_end|>",
    ]
    assert chatml.decode(example.input_ids.tolist()) == chatml.render(chat(*LONG_CHAT))


def test_ids_before_an_answer_are_the_prompt_a_server_reads(chatml: ChatTemplate, chat) -> None:
    messages = chat(*LONG_CHAT)
    ids = to_example(_row(messages), chatml).input_ids.tolist()
    for i in (1, 3, 5):
        prompt = chatml.tokenizer.apply_chat_template(
            messages[:i], add_generation_prompt=True, return_dict=False
        )
        assert ids[: len(prompt)] == prompt


def test_system_and_tool_text_is_kept_and_never_supervised(chatml: ChatTemplate) -> None:
    roles = ["system", "user", "assistant", "tool", "assistant"]
    texts = ["use tools", "weather?", '{"name": "weather"}', "12 degrees", "it is 12"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, texts, strict=True)]
    example = to_example(_row(messages), chatml)
    text = chatml.decode(example.input_ids.tolist())
    assert [text.index(part) for part in texts] == sorted(text.index(part) for part in texts)
    assert _supervised(example, chatml) == [f"{texts[2]}<|im_end|>", f"{texts[4]}<|im_end|>"]


@pytest.mark.parametrize("reason", [None, "length"])
@pytest.mark.parametrize(
    ("body", "rest"), [("'<|im_end|>'", "'\n'"), ("'<|im_end|>\n'", "''"), ("''", "'<|im_end|>\n'")]
)
def test_generation_markers_give_the_same_mask(
    make_tokenizer, chatml: ChatTemplate, chat, body: str, rest: str, reason: str | None
) -> None:
    source = MARKED.replace("BODY", body).replace("REST", rest)
    marked = ChatTemplate(make_tokenizer(source))
    assert marked.marks_answers
    row = _row(chat("hi", "hello", "and?", "bye"), finish_reason=reason)
    left, right = to_example(row, marked), to_example(row, chatml)
    assert left.input_ids.tolist() == right.input_ids.tolist()
    assert left.loss_mask.tolist() == right.loss_mask.tolist()


def test_a_cut_answer_has_no_end_of_turn(chatml: ChatTemplate, chat) -> None:
    messages = chat("hi", "one", "more", "two and")
    example = to_example(_row(messages, finish_reason="length"), chatml)
    assert _supervised(example, chatml) == ["one<|im_end|>", "two and"]
    assert chatml.decode(example.input_ids.tolist()).endswith("assistant\ntwo and")
    text = chatml.render(messages)
    rendered = to_example(_text(text.removesuffix("\n"), finish_reason="length"), chatml)
    assert rendered.input_ids.tolist() == example.input_ids.tolist()
    assert rendered.loss_mask.tolist() == example.loss_mask.tolist()


def test_a_template_that_rewrites_all_before_an_answer_is_refused(make_tokenizer, chat) -> None:
    """No text begins with the prompt that was answered."""
    source = (
        "{{ messages | length }}{%- for m in messages -%}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    with pytest.raises(Unusable, match="rewrites earlier turns with each answer"):
        to_example(_row(chat("a", "b")), ChatTemplate(make_tokenizer(source)))


def test_a_template_that_marks_the_last_answer(make_tokenizer, chat) -> None:
    source = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' and loop.last -%}{{ '<think></think>' }}{%- endif -%}"
        "{{ m.content + '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    template = ChatTemplate(make_tokenizer(source))
    examples = to_examples(_row(chat("a", "b", "c", "d")), template)
    written = [_supervised(example, template) for example in examples]
    assert written == [["<think></think>b<|im_end|>"], ["<think></think>d<|im_end|>"]]


def test_a_template_that_drops_a_turn_is_refused(make_tokenizer, chat) -> None:
    source = (
        "{%- for m in messages if m.role != 'system' -%}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    messages = [{"role": "system", "content": "rhyme"}, *chat("q", "a")]
    with pytest.raises(Unusable, match="drops or rewrites the text of a system turn"):
        to_example(_row(messages), ChatTemplate(make_tokenizer(source)))


def test_tool_calls_are_supervised_or_the_row_is_refused(
    make_tokenizer, chatml: ChatTemplate
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {}}}
    row = _row(
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "12", "tool_call_id": "c1"},
            {"role": "assistant", "content": "12 degrees"},
        ]
    )
    with pytest.raises(Unusable, match="does not render tool_calls"):
        to_example(row, chatml)
    template = ChatTemplate(make_tokenizer(TOOLS))
    spans = _supervised(to_example(row, template), template)
    assert spans == ["<call>weather<|im_end|>", "12 degrees<|im_end|>"]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_exactly_one_bos(make_tokenizer, chat, adds_bos: bool) -> None:
    template = ChatTemplate(make_tokenizer(STRICT, adds_bos=adds_bos))
    messages = chat("hi", "hello")
    body = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    texts = [body, "<|bos|>" + body, "<|bos|><|bos|>" + body]
    examples = [to_example(row, template) for row in (_row(messages), *map(_text, texts))]
    for example in examples:
        ids = example.input_ids.tolist()
        assert ids.count(BOS) == 1
        assert ids[0] == BOS
        assert ids == examples[0].input_ids.tolist()
        assert _supervised(example, template) == ["hello<|im_end|>"]


def test_a_template_without_bos_gets_none(make_tokenizer, chatml: ChatTemplate, chat) -> None:
    text = chatml.render(chat("hi", "hello"))
    template = ChatTemplate(make_tokenizer(adds_bos=True))
    assert BOS not in to_example(_row(chat("hi", "hello")), template).input_ids.tolist()
    assert BOS not in to_example(_text(text), template).input_ids.tolist()
    given = to_example(_text("<|bos|>" + text), template).input_ids.tolist()
    assert given.count(BOS) == 1


def test_a_bos_that_opens_turns_is_left_alone(make_tokenizer, chat) -> None:
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|im_start|>"  # as SmolLM2 names it
    template = ChatTemplate(tokenizer)
    text = template.render(chat("hi", "hello"))
    assert template.decode(to_example(_text(text), template).input_ids.tolist()) == text


def test_the_templates_own_refusal_is_the_reason(make_tokenizer, chat) -> None:
    template = ChatTemplate(make_tokenizer(STRICT))
    messages = [{"role": "system", "content": "s"}, *chat("q", "a")]
    with pytest.raises(Unusable, match="no system turn in this template"):
        to_example(_row(messages), template)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|user|>\nquestion\n<|assistant|>\nanswer\n", "nothing in it is supervised"),
        ("<|im_start|>assistant\na<|im_start|>assistant\nb<|im_end|>", "begins before"),
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "nothing in it is supervised"),
    ],
)
def test_text_without_answers_is_refused(chatml: ChatTemplate, text: str, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        to_example(_text(text), chatml)


def test_a_conversation_without_answer_is_refused(chatml: ChatTemplate, chat) -> None:
    with pytest.raises(Unusable, match="no assistant turn"):
        to_example(_row(chat("hi")), chatml)


def test_a_template_without_end_of_turn_supervises_the_answer_alone(make_tokenizer, chat) -> None:
    source = (
        "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
    )
    template = ChatTemplate(make_tokenizer(source))
    example = to_example(_row(chat("a", "b", "c", "d")), template)
    assert _supervised(example, template) == ["b", "d"]


def test_a_tokenizer_without_template_is_refused(make_tokenizer, tmp_path, chat) -> None:
    tokenizer = make_tokenizer(None)
    with pytest.raises(UserError, match="no chat template"):
        ChatTemplate(tokenizer)
    file = tmp_path / "own.jinja"
    with pytest.raises(UserError, match=r"own\.jinja: cannot be read"):
        ChatTemplate(tokenizer, file)
    file.write_text(STRICT)
    template = ChatTemplate(tokenizer, file)
    assert _supervised(to_example(_row(chat("q", "a")), template), template) == ["a<|im_end|>"]


def test_a_template_that_fails_on_any_chat_is_refused(make_tokenizer, chat) -> None:
    template = ChatTemplate(make_tokenizer("{{ raise_exception('never') }}"))
    with pytest.raises(UserError, match="fails on one question and answer"):
        to_example(_text("anything"), template)
