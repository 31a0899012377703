"""Simulated rounds against rounds made one by one with the target itself at hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3_core import CacheContext, Eagle3Draft
from eagle3_core.accept import AcceptCounts
from eagle3_core.attention import TreeContext
from eagle3_core.target import Target
from eagle3_core.tree import TreeShape, draft_tree
from eagle3_core.vocab import vocab_map
from eagle3_train.build import draft_config
from eagle3_train.capture import Capturer
from eagle3_train.cli import main
from eagle3_train.config import DraftSection
from eagle3_train.data.mask import Example
from eagle3_train.evaluate import evaluate
from eagle3_train.simulate import LAWS, Simulated, Simulator
from eagle3_train.store import Sample

PROMPT, LENGTH, K = 5, 20, 2
# Wide, so that walks of a poor draft reach the last depth too.
SHAPE = TreeShape(K, topk=48, num_verify_tokens=1200)


@pytest.fixture(scope="module")
def draft(target: Target) -> Eagle3Draft:
    """Follows the target a little: its head and embeddings, and every third token left out."""
    section = DraftSection(layer_input="every", num_hidden_layers=2)
    kept = torch.tensor([i for i in range(target.vocab_size) if i % 3])
    built = Eagle3Draft(draft_config(section, target, (1, 2, 4), len(kept)))
    built.init_weights(torch.Generator().manual_seed(3), std=0.2)
    d2t, t2d = vocab_map(kept, target.vocab_size)
    built.d2t.copy_(d2t)
    built.t2d.copy_(t2d)
    with torch.no_grad():
        built.lm_head.weight.copy_(target.lm_head[kept])
        built.fc.weight[:, -target.hidden_size :] += torch.eye(target.hidden_size)
    return built.requires_grad_(False)


@pytest.fixture(scope="module")
def samples(target: Target) -> list[Sample]:
    """One answer written greedily, one drawn."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for greedy in (True, False):
        ids = torch.randint(256, (1, PROMPT), generator=generator)
        while ids.shape[1] < LENGTH:
            logits = target.model(ids).logits[:, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True) if greedy else drawn], 1)
        examples.append(Example("here:1", ids[0], torch.arange(LENGTH) >= PROMPT))
    return Capturer(target, (1, 2, 4), torch.float32).run(examples)[0]


def laws(target: Target, ids: Tensor) -> Tensor:
    """[S,V] the target's own probabilities after each token."""
    with torch.no_grad():
        return target.model(ids[None]).logits[0].double().softmax(-1)


def one_by_one(draft: Eagle3Draft, target: Target, sample: Sample) -> dict[str, list[float]]:
    """Shares accepted at each depth by every law, each round on a prefix of its own."""
    ids, p = sample.input_ids.long(), laws(target, sample.input_ids.long())
    found = {law: [0.0] * K for law in LAWS}
    for slot in range(PROMPT - 1, LENGTH - K - 1):
        cache = CacheContext()
        e = draft.embed(ids[None, 1 : slot + 2])
        x = draft.project(sample.aux[None, : slot + 1])
        h = draft(e, x, torch.arange(slot + 1)[None], cache)[:, -1]
        for name, shape in (("chain", TreeShape(K)), ("tree", SHAPE)):
            tree = draft_tree(
                draft, ids[None, slot + 1], h, torch.tensor([slot]), TreeContext(cache), shape
            )
            tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
            for law, wanted in (("greedy", sample.argmax[1:-1]), ("sampled", ids[2:])):
                node = 0
                for depth in range(K):
                    children = [i for i, parent in enumerate(parents) if parent == node]
                    token = int(wanted[slot + depth])
                    hit = [i for i in children if tokens[i] == token]
                    if law == "sampled":
                        share = sum(float(p[slot + 1 + depth, tokens[i]]) for i in children)
                        found[f"sampled_{name}"][depth] += share
                    else:
                        found[f"greedy_{name}"][depth] += len(hit)
                    if not hit:
                        break
                    node = hit[0]
        reach = 1.0
        context = TreeContext(cache)
        for depth in range(K):
            q = torch.zeros(p.shape[1], dtype=torch.float64)
            kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
            q[kept] = draft.logits(h[None])[0, 0].double().softmax(-1)
            row, token = p[slot + 1 + depth], ids[slot + 2 + depth]
            found["drawn_chain"][depth] += reach * float(torch.minimum(row, q).sum())
            reach *= min(1.0, float(q[token] / row[token]))
            context.lineage = torch.zeros(1, 1, depth + 1, dtype=torch.int64)
            h = draft(
                draft.embed(token[None, None]),
                draft.feedback(h[None]),
                torch.tensor([[slot + 1 + depth]]),
                context,
            )[0]
    return found


def test_every_law_is_that_of_rounds_made_one_by_one(
    draft: Eagle3Draft, target: Target, samples: list[Sample]
) -> None:
    simulator = Simulator(draft, target.lm_head.float(), SHAPE)
    rounds = LENGTH - K - PROMPT
    hits = 0.0
    for sample in samples:
        found = simulator.run(sample)
        expected = one_by_one(draft, target, sample)
        assert found.num_rounds == rounds
        for law in LAWS:
            # float32 sums of another order: rows of a batch, and log-probabilities by way of logz.
            assert found.laws[law].accepted == pytest.approx(expected[law], abs=2e-4), law
        hits += found.laws["greedy_tree"].accepted[-1]
    assert hits > 0  # some walk reached the last depth, so that depths are told apart


def test_a_greedy_chain_is_what_the_unroll_counts(
    draft: Eagle3Draft, target: Target, samples: list[Sample]
) -> None:
    class Held(list[Sample]):
        lengths = (LENGTH,)

    kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    counts = evaluate(draft, Held(samples[:1]), [0], target.lm_head[kept].float(), K, 64)
    found = Simulator(draft, target.lm_head.float(), SHAPE).run(samples[0])
    assert found.laws["greedy_chain"].accepted == tuple(counts["accepted"].tolist())


def test_chunks_do_not_change_the_counts(
    draft: Eagle3Draft, target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = Simulator(draft, target.lm_head.float(), SHAPE)
    whole = simulator.run(samples[1]).summary()
    monkeypatch.setattr("eagle3_train.simulate._CHUNK_ELEMENTS", 1)
    cut = simulator.run(samples[1]).summary()
    for law, values in whole["laws"].items():
        assert cut["laws"][law]["accept_length"] == pytest.approx(values["accept_length"], abs=1e-5)


def test_the_shares_tell_greedy_answers_from_drawn_ones(
    draft: Eagle3Draft, target: Target, samples: list[Sample]
) -> None:
    simulator = Simulator(draft, target.lm_head.float(), SHAPE)
    greedy = simulator.run(samples[0]).summary()
    assert greedy["argmax_share"] == 1
    p = laws(target, samples[0].input_ids.long())[PROMPT : LENGTH - K]
    assert greedy["argmax_probability"] == pytest.approx(float(p.amax(-1).mean()), rel=1e-4)


def test_answers_too_short_for_a_round_count_nothing(
    draft: Eagle3Draft, target: Target, samples: list[Sample]
) -> None:
    short = replace(samples[0], loss_mask=torch.arange(LENGTH) >= LENGTH - K)
    found = Simulator(draft, target.lm_head.float(), SHAPE).run(short)
    assert found == Simulated.nothing(K)
    assert found.laws["drawn_chain"] == AcceptCounts(0, (0.0, 0.0))
    assert found.summary()["laws"]["greedy_tree"]["accept_length"] is None


def test_eval_names_every_file(
    write_run: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path)
    values = json.loads(path.read_text())
    rows = (tmp_path / "eval.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("chat", rows[:3]), ("code", rows[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    values["data"]["eval"] = [str(tmp_path / "chat.jsonl"), str(tmp_path / "code.jsonl")]
    values["fit"]["max_steps"] = 1
    values["eval"] |= {"topk": 2, "num_verify_tokens": 6}
    path.write_text(json.dumps(values))
    for stage in ("capture", "fit"):
        assert main([stage, str(path)]) == 0
    capsys.readouterr()
    assert main(["eval", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [d["name"] for d in found["datasets"]] == values["data"]["eval"]
    assert sum(d["rounds"] for d in found["datasets"]) == found["num_rounds"]
    assert json.loads((tmp_path / "out/eval.json").read_text()) == found
    assert "T = 1, tree" in (tmp_path / "out/report.html").read_text()
    assert main(["eval", str(path)]) == 0
    table = capsys.readouterr().out
    assert "accept length" in table
    assert main(["eval", str(path), "eval.num_verify_tokens=99"]) == 2
    assert "eval.num_verify_tokens is 99, expected 2..11" in capsys.readouterr().err
