"""The README is executed: a tiny model takes the place of the user's own.

A comment in front of each block says how it is tested:
`target` its make targets exist · `file NAME` is written · `run` is executed · `serve` is started
in the background · `client` is sent to it · `python` is executed with small inputs.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BLOCK = re.compile(r"<!-- test: (?P<how>.*?) -->\n```\w+\n(?P<code>.*?)```", re.DOTALL)
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def blocks(root: Path) -> list[tuple[str, str]]:
    return [
        match.group("how", "code") for match in BLOCK.finditer((root / "README.md").read_text())
    ]


def write_target(folder: Path) -> None:
    """A random model whose tokens are bytes; eight layers, so that three aux states differ."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(letters))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def user_folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user would stand, with the files that the README writes."""
    folder = tmp_path_factory.mktemp("readme")
    write_target(folder / "my-model")
    questions = ["Hello", "What is a bee?", "Tell me a joke.", "Count to five."]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in questions]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for how, code in blocks(root):
        if how.startswith("file "):
            (folder / how.removeprefix("file ")).write_text(code)
    return folder


def shell(code: str, folder: Path) -> str:
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, f"{code}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    return run.stdout


@pytest.fixture(scope="module")
def after_commands(root: Path, user_folder: Path) -> Path:
    """The folder once every `run` block has been executed, in the README's order."""
    for how, code in blocks(root):
        if how == "run":
            shell(code, user_folder)
    return user_folder


@pytest.fixture
def port(root: Path, after_commands: Path) -> Iterator[int]:
    """Of the server that the `serve` block starts, on a free port instead of the README's."""
    code = next(code for how, code in blocks(root) if how == "serve")
    assert "--port 8000" in code
    command = code.replace("--port 8000", "--port 0 --json").split()
    server = subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        cwd=after_commands,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["port"]
    finally:
        server.terminate()
        server.wait(timeout=60)


def test_every_block_says_how_it_is_tested(root: Path) -> None:
    text = (root / "README.md").read_text()
    assert len(blocks(root)) == len(re.findall(r"^```\w+$", text, re.MULTILINE)) > 0
    kinds = {"target", "file", "run", "serve", "client", "python"}
    assert {how.split()[0] for how, _ in blocks(root)} == kinds


def test_named_make_targets_exist(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    defined = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    documented = set(re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE))
    assert defined == documented, "every target has a description"
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`make ([a-z-]+)`", page.read_text())}
    assert named - defined == set()
    required = ["sync", "lint", "type", "arch", "test", "demo", "demo-long", "bench", "docs", "ci"]
    assert set(required) <= defined


@pytest.mark.slow
def test_the_commands_train_a_draft_and_use_it(after_commands: Path) -> None:
    assert (after_commands / "runs/mine/draft/model.safetensors").exists()
    answers = (after_commands / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 4


@pytest.mark.slow
def test_the_server_answers_the_curl(root: Path, after_commands: Path, port: int) -> None:
    code = next(code for how, code in blocks(root) if how == "client")
    assert ":8000/" in code
    answer = json.loads(shell(code.replace(":8000/", f":{port}/"), after_commands))
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] >= 1


@pytest.mark.slow
def test_the_python_runs(root: Path, after_commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(after_commands)
    code = next(code for how, code in blocks(root) if how == "python")
    names = {
        "aux": torch.randn(1, 5, 3 * 32),
        "ids": torch.randint(0, 256, (1, 5)),
        "position_ids": torch.arange(5)[None],
    }
    with torch.no_grad():
        exec(code, names)
    assert names["proposed"].shape == (1, 5)
