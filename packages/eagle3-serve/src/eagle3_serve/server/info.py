"""What a running server is: versions, models, settings, and how it has fared."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from eagle3_serve.engine import Engine

_PACKAGES = ("eagle3-serve", "eagle3-core", "torch", "transformers", "llguidance")


def server_info(engine: Engine, tool_call_parser: str | None) -> dict[str, Any]:
    """JSON-ready."""
    target, draft = engine.target, engine.draft_config
    return {
        "versions": {name: version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
        "target": {
            "name": target.name,
            "architecture": type(target.model).__name__,
            "dtype": str(target.model.dtype).removeprefix("torch."),
            "device": str(target.model.device),
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "num_layers": target.num_layers,
            "max_position_embeddings": target.max_position_embeddings,
            "eos_token_ids": list(target.eos_token_ids),
        },
        "draft": None if draft is None else draft.to_dict(),
        "engine": asdict(engine.config),
        "max_model_len": engine.max_model_len,
        "tool_call_parser": tool_call_parser,
        "kv_pages": {"total": engine.num_pages, "free": engine.num_free_pages},
        "requests": {"running": engine.num_running, "waiting": engine.num_waiting},
        "stats": engine.stats.to_dict(),
    }
