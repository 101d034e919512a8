"""Generated tokens are transformers' own, for any number of stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from procpipe import Stage, hf
from tests.dist.stages import stage_of
from tests.hf.cases import CASES, model_of

CAUSAL = [name for name, (_, suffix, _) in CASES.items() if suffix != "ForSequenceClassification"]
CAUSAL = [name for name in CAUSAL if not name.startswith(("T5", "BERT"))]


WAYS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "temperature": 3.0})


def prompts_of(name):
    """Return prompts, some of them padded on the left, and their mask."""
    tokens = torch.randint(3, 31, (5, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(tokens)
    if name != "Gemma 2":  # see batch_of
        mask[1, :3] = mask[3, :1] = 0
    return tokens * mask, mask


def stage_in_one(name):
    layers = hf.sequential(model_of(name))
    return Stage(layers, [len(layers)], chunks=2)


def test_greedy_tokens_are_those_of_transformers():
    for name in CAUSAL:
        tokens, mask = prompts_of(name)
        plain = model_of(name).eval()
        plain.config.output_router_logits = False  # transformers cannot generate with it
        expected = plain.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
        stage = stage_in_one(name)

        found = hf.generate(stage, tokens, attention_mask=mask, max_new_tokens=5)

        assert found.tolist() == expected.tolist(), name
        assert stage.training, name


def test_modes_of_modules_stay_as_they_were():
    stage = stage_in_one("GPT-2")
    stage[1].eval()
    before = [module.training for module in stage.modules()]

    hf.generate(stage, prompts_of("GPT-2")[0], max_new_tokens=2)

    assert [module.training for module in stage.modules()] == before
    assert {True, False} == {*before}


def test_sequences_end_at_their_own_ends():
    tokens, mask = prompts_of("GPT-2")
    free = hf.generate(stage_in_one("GPT-2"), tokens, attention_mask=mask, eos_token_id=[])
    ends = [int(free[0, 9]), int(free[1, 8])]
    plain = model_of("GPT-2").eval()
    expected = plain.generate(
        tokens, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=ends,
        pad_token_id=ends[0],
    )  # fmt: skip

    found = hf.generate(
        stage_in_one("GPT-2"), tokens, attention_mask=mask, max_new_tokens=9, eos_token_id=ends
    )

    as_tensor = hf.generate(
        stage_in_one("GPT-2"),
        tokens,
        attention_mask=mask,
        max_new_tokens=9,
        eos_token_id=torch.tensor(ends),
    )
    assert free.shape == (5, 27)
    assert as_tensor.tolist() == expected.tolist()
    assert found.tolist() == expected.tolist()


def test_the_generation_config_of_the_model_counts():
    tokens, mask = prompts_of("Llama")
    assert not mask.all(), "there are padding tokens, and no mask is given"
    plain = model_of("Llama").eval()
    free = hf.generate(stage_in_one("Llama"), tokens, max_new_tokens=8)
    for values in ({}, {"repetition_penalty": 1.8}, {"suppress_tokens": [int(free[0, 7])]}):
        model = model_of("Llama")
        for each in (plain, model):
            each.generation_config.update(**values)
        expected = plain.generate(tokens, max_new_tokens=8, do_sample=False)

        found = hf.generate(Stage(hf.sequential(model), [5], chunks=2), tokens, max_new_tokens=8)

        assert found.tolist() == expected.tolist(), values
        assert torch.equal(found, free) == (not values), values
        plain = model_of("Llama").eval()
    model.generation_config.top_k = 1
    stage = Stage(hf.sequential(model), [5])
    sampled = hf.generate(stage, tokens, max_new_tokens=8, do_sample=True, temperature=3)
    assert sampled.tolist() == expected.tolist()


def test_samples_follow_the_probabilities():
    stage = stage_in_one("GPT-2")
    prompt = torch.full((2000, 2), 5)
    with torch.no_grad():
        logits = model_of("GPT-2").eval()(prompt[:1]).logits[0, -1]
    torch.manual_seed(0)

    found = hf.generate(stage, prompt, max_new_tokens=1, do_sample=True, temperature=2.0)

    shares = torch.bincount(found[:, -1], minlength=31) / 2000
    expected = torch.softmax(logits / 2.0, -1)
    errors = (shares - expected).abs() / (expected * (1 - expected) / 2000).sqrt()
    assert errors.max() < 4.5  # standard deviations


def test_wrong_arguments_are_refused():
    stage = stage_in_one("GPT-2")
    tokens, mask = prompts_of("GPT-2")
    for arguments, fault in (
        ({"input_ids": None}, "input_ids must be prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": None}, "max_new_tokens is None, but must be an int"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be an int, or several, not 'a'"),
        ({"eos_token_id": 2.0}, "not iterable"),
        ({"do_sample": True, "temperature": "hot"}, "not supported between"),
        ({"attention_mask": [1]}, "attention_mask must be a tensor, not list"),
        ({"do_sample": True, "temperature": 0.0}, "temperature is 0.0"),
        ({"attention_mask": mask.flip(1)}, "padded on the left"),
    ):
        with pytest.raises(ValueError, match=fault):
            hf.generate(stage, **{"input_ids": tokens, **arguments})
    with pytest.raises(TypeError, match="not of a BertForMaskedLM"):
        hf.generate(stage_in_one("BERT, tied"), tokens)


def test_several_processes_generate_the_same(ranks):
    expected = []
    for name in ("GPT-2", "Mistral"):
        tokens, mask = prompts_of(name)
        stage = stage_in_one(name)
        for options in WAYS:
            torch.manual_seed(7)
            expected.append(
                hf.generate(
                    stage, tokens, attention_mask=mask, max_new_tokens=6, eos_token_id=[], **options
                ).tolist()
            )

    for found in ranks(2).run(generated, world=False, timeout_s=60).values():
        assert found == expected
    assert expected[0] != expected[1]


def generated(bare):
    """Generate with two models; only rank 0 has the arguments."""
    found = []
    for name in ("GPT-2", "Mistral"):
        layers = hf.sequential(model_of(name))
        with stage_of(bare, name, layers, [2, len(layers) - 2], chunks=2) as stage:
            with pytest.raises(ValueError, match="max_new_tokens is 0"):  # of rank 0
                hf.generate(stage, prompts_of(name)[0], max_new_tokens=bare.rank)
            for options in WAYS:
                torch.manual_seed(7 + bare.rank)
                tokens, mask = prompts_of(name)
                given = {"input_ids": tokens, "attention_mask": mask, "max_new_tokens": 6}
                given |= {"eos_token_id": [], **options}
                found.append(hf.generate(stage, **(given if bare.rank == 0 else {})).tolist())
    return found


def test_replicas_generate_the_same(ranks):
    tokens, mask = prompts_of("GPT-2")
    stage = stage_in_one("GPT-2")
    expected: list[list[Any]] = []
    for replica in range(2):
        expected.append([])
        for num, options in ((5 - replica, WAYS[0]), (4, WAYS[1])):
            torch.manual_seed(7 + replica)
            given = {"attention_mask": mask[:num], "max_new_tokens": 6, **options}
            expected[-1].append(hf.generate(stage, tokens[:num], **given).tolist())

    found = ranks(4).run(generated_by_replicas, world=False, timeout_s=60).values()
    assert found == [expected[0], expected[0], expected[1], expected[1]]


def generated_by_replicas(bare):
    """Continue sequences of each replica's own."""
    tokens, mask = prompts_of("GPT-2")
    layers = hf.sequential(model_of("GPT-2"))
    balance = [2, len(layers) - 2]
    found = []
    with stage_of(bare, "replicas", layers, balance, chunks=2, replicas=2) as stage:
        for num, options in ((5 - stage.replica, WAYS[0]), (4, WAYS[1])):
            torch.manual_seed(7 + stage.replica)
            given = {"attention_mask": mask[:num], "max_new_tokens": 6, **options}
            found.append(hf.generate(stage, tokens[:num], **given).tolist())
    return found


def test_logits_that_are_nan_end_generation_on_every_rank():
    stage = stage_in_one("GPT-2")
    tokens, _ = prompts_of("GPT-2")
    expected = hf.generate(stage, tokens, max_new_tokens=2).tolist()
    last = stage[4].transformer.ln_f.weight
    before = last.detach().clone()
    for way in WAYS:
        torch.nn.init.constant_(last, float("nan"))
        with pytest.raises(ValueError, match="logits of sequence 0 are NaN after 7 tokens"):
            hf.generate(stage, tokens, max_new_tokens=2, **way)
        with torch.no_grad():
            last.copy_(before)
        assert hf.generate(stage, tokens, max_new_tokens=2).tolist() == expected, way
