"""What does a round of K drafted tokens cost, and which accept length pays for it?

    benchmarks/round_cost.py [TARGET] [--tokens N] [--draft-vocab-size D]

One request, fp32, one layer of draft, whose weights are random: they decide how many tokens are
accepted, not what a round costs. Prints one JSON object: for each K the milliseconds of each phase
of a round, and the accept length above which K is faster than decoding without a draft.
"""

import argparse
import json
import platform
import subprocess
from importlib.metadata import version

import torch

from eagle3_core import DraftConfig, Eagle3Draft
from eagle3_core.target import Target, load_target
from eagle3_core.vocab import vocab_map
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.sampling import SamplingParams

LENGTHS = (0, 1, 2, 3, 4, 5, 6)
PROMPT = list(range(100, 164))


def random_draft(target: Target, draft_vocab_size: int) -> Eagle3Draft:
    """A draft of the target's own sizes."""
    text = target.config
    config = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=target.hidden_size // text.num_attention_heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        num_aux_hidden_states=3,
        aux_layer_ids=(2, target.num_layers // 2, target.num_layers - 3),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    draft = Eagle3Draft(config).eval()
    draft.init_weights(torch.Generator().manual_seed(0))
    if config.is_pruned:
        d2t, t2d = vocab_map(torch.arange(draft_vocab_size), target.vocab_size)
        draft.d2t.copy_(d2t)
        draft.t2d.copy_(t2d)
    return draft


def milliseconds(engine: Engine, num_tokens: int) -> dict[str, float]:
    """Of each phase of a round, averaged over one answer; the prompt's pass is left out."""
    engine.add(PROMPT, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    engine.step()
    engine.reset_stats()
    while engine.has_work:
        engine.step()
    rounds = engine.stats.num_rounds
    return {phase: 1e3 * seconds / rounds for phase, seconds in engine.stats.seconds.items()}


def main() -> None:
    """Measure every K and print the object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    arguments = parser.parse_args()
    target = load_target(arguments.target, torch.float32)
    draft = random_draft(target, arguments.draft_vocab_size)
    rows = []
    for k in LENGTHS:
        config = EngineConfig(num_speculative_tokens=k, max_batch_size=1, max_model_len=1024)
        engine = Engine(target, draft if k else None, config)
        milliseconds(engine, 8)  # warm up
        phases = milliseconds(engine, arguments.tokens)
        rows.append({"K": k, "ms": sum(phases.values()), "phases_ms": phases})
    for row in rows:
        row["break_even_accept_length"] = row["ms"] / rows[0]["ms"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    facts = {
        "target": arguments.target,
        "draft_vocab_size": arguments.draft_vocab_size,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": version("torch"),
        "commit": commit.strip(),
    }
    print(json.dumps({"benchmark": "round_cost", **facts, "rounds": rows}))


if __name__ == "__main__":
    main()
