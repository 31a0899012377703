"""Drafts on the one state behind the target's final norm, as heads without aux layers have it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, PretrainedConfig

from eagle3_core.tree import TreeShape
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.sampling import SamplingParams
from eagle3_train.capture import Capturer
from eagle3_train.data.mask import Example
from eagle3_train.simulate import Simulator

PROMPTS = [[7, 2, 9], [1, 8, 30, 4]]
LENGTH, K = 24, 3
FINAL_NORM = {"aux_source": "final_norm", "num_aux_hidden_states": 1, "aux_layer_ids": None}


@pytest.mark.parametrize("has_fc", [True, False])
@pytest.mark.parametrize("kind", [LlamaConfig, GemmaConfig])  # fused, and the model's own code
def test_the_engine_accepts_what_the_simulation_of_the_trainer_does(
    pairs: Any, kind: type[PretrainedConfig], has_fc: bool
) -> None:
    """A round behind every token of recorded answers, one by one in the engine."""
    target = pairs.target(kind=kind, hidden_size=24)
    draft = pairs.draft(target, has_fc=has_fc, **FINAL_NORM)
    pairs.fit(target, draft, PROMPTS, LENGTH)
    samples = []
    for prompt in PROMPTS:
        ids = torch.tensor(prompt + pairs.greedy(target, prompt, LENGTH))
        mask = torch.arange(len(ids)) >= len(prompt)
        (sample,), _ = Capturer(target, (1,), torch.float32).run([Example("here", ids, mask)])
        samples.append(replace(sample, aux=sample.final))
    simulator = Simulator(draft, target.lm_head.float(), TreeShape(K))
    simulated = [simulator.run(sample).laws["greedy_chain"] for sample in samples]
    assert all(min(counts.accepted) > 0 for counts in simulated), "some round goes to the end"

    engine = Engine(target, draft, EngineConfig(num_speculative_tokens=K, max_batch_size=1))
    for prompt, sample, counts in zip(PROMPTS, samples, simulated, strict=True):
        ids = sample.input_ids.tolist()
        accepted = [0] * K
        for end in range(len(prompt), len(ids) - K):
            params = SamplingParams(max_tokens=K + 2, temperature=0, ignore_eos=True)
            request = engine.add(ids[:end], params)
            (first,), (second,) = engine.step(), engine.step()
            assert first.token_ids == [ids[end]]
            for position in range(second.stats.num_accepted_tokens):
                accepted[position] += 1
            engine.abort(request)
        assert tuple(accepted) == counts.accepted


def test_the_text_is_that_of_plain_decoding(pairs: Any) -> None:
    target = pairs.target()
    draft = pairs.draft(target, **FINAL_NORM)
    params = SamplingParams(max_tokens=LENGTH, temperature=0)
    texts = []
    for own in (None, draft):
        engine = Engine(target, own, EngineConfig(num_speculative_tokens=K))
        request = engine.add(PROMPTS[0], params)
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step():
                assert output.request_id == request
                tokens += output.token_ids
        texts.append(tokens)
    assert texts[0] == texts[1]
