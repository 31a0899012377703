"""The stage that measures a draft on the held-out samples."""

from pathlib import Path
from typing import Any

import torch

from eagle3_core import DraftConfig, UserError, load_draft
from eagle3_core.pair import check_pair
from eagle3_core.tree import TreeShape
from eagle3_train.config import TrainConfig
from eagle3_train.display import display
from eagle3_train.evaluate import evaluate
from eagle3_train.report import write_report
from eagle3_train.resume import write_json
from eagle3_train.simulate import Simulated, Simulator
from eagle3_train.stages.features import Features, open_features, sample_sources


def run_eval(config: TrainConfig, draft_folder: str | None) -> dict[str, Any]:
    """Accept lengths of OUT/draft (or another), simulated on the held-out samples: OUT/eval.json.

    Another draft's are only returned.
    """
    section = config.eval
    tree = _tree_shape(config)
    store = open_features(config, "eval")
    folder = Path(draft_folder) if draft_folder else config.out / "draft"
    loaded = load_draft(folder)
    _check_belongs(loaded.config, folder, store)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    draft, head = loaded.draft.to(device), store.head().float().to(device)
    simulator = Simulator(draft, head, tree)
    datasets: dict[str, Simulated] = {}
    with display("eval", len(store)) as bar:
        for done, name in enumerate(sample_sources(config, "eval", store)):
            found = simulator.run(store[done])
            datasets[name] = datasets[name] + found if name in datasets else found
            bar.update(done + 1)
    counts = evaluate(
        draft,
        store,
        range(len(store)),
        simulator.kept_head,
        section.num_speculative_tokens,
        section.batch_tokens,
    )
    result = {
        "draft": str(folder),
        "samples": len(store),
        "num_speculative_tokens": section.num_speculative_tokens,
        "topk": section.topk,
        "num_verify_tokens": section.num_verify_tokens,
        **counts.summary(),
        "datasets": [{"name": name, **found.summary()} for name, found in datasets.items()],
    }
    if draft_folder is None:
        write_json(config.out / "eval.json", result)
        write_report(config.out)
    return result


def _tree_shape(config: TrainConfig) -> TreeShape:
    section = config.eval
    try:
        return TreeShape(section.num_speculative_tokens, section.topk, section.num_verify_tokens)
    except ValueError as error:
        raise UserError(f"eval.{error}") from None


def _check_belongs(config: DraftConfig, folder: Path, store: Features) -> None:
    meta = store.meta
    check_pair(
        folder,
        config,
        meta.target,
        vocab_size=meta.vocab_size,
        hidden_size=meta.hidden_size,
        num_layers=meta.num_target_layers,
    )
    if (config.aux_layer_ids or meta.aux_layer_ids) != meta.aux_layer_ids:
        raise UserError(
            f"{folder}: aux_layer_ids is {list(config.aux_layer_ids or ())}, but the captured "
            f"states are of {list(meta.aux_layer_ids)}; capture those that the draft reads"
        )
