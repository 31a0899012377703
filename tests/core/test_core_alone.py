"""eagle3_core works where no trainer, kernel or web package is installed."""

import subprocess
import sys

# A name that maps to None in sys.modules cannot be imported and counts as not installed, for
# torch and transformers too, which use some of these when they find them.
SCRIPT = """
import sys
for name in {forbidden!r}:
    assert name not in sys.modules, name
    sys.modules[name] = None
import pkgutil, importlib, torch, eagle3_core
for module in pkgutil.walk_packages(eagle3_core.__path__, "eagle3_core."):
    importlib.import_module(module.name)
config = eagle3_core.DraftConfig(
    hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    vocab_size=9, draft_vocab_size=9, target_hidden_size=8, num_aux_hidden_states=1,
    rope_parameters={{"rope_type": "default", "rope_theta": 100.0}},
)
draft = eagle3_core.Eagle3Draft(config)
x = torch.zeros(1, 2, 8)
draft.logits(draft(x, x, torch.arange(2)[None], eagle3_core.CacheContext())).sum().backward()
strangers = sorted({{"eagle3_train", "eagle3_serve"}} & set(sys.modules))
print("strangers:", strangers)
"""
FORBIDDEN = (
    "accelerate",
    "deepspeed",
    "triton",
    "datasets",
    "fastapi",
    "uvicorn",
    "starlette",
    "pydantic",
)


def test_core_imports_and_runs_without_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(forbidden=FORBIDDEN)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "strangers: []\n"
