"""Generated tokens are transformers' own, for any number of stages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from procpipe import Stage, hf
from tests.dist.stages import stage_of
from tests.hf.cases import CASES, LEFT, batches_of, model_of

CAUSAL = [name for name, (_, suffix, _) in CASES.items() if suffix != "ForSequenceClassification"]
CAUSAL = [name for name in CAUSAL if not name.startswith(("T5", "BERT"))]


#: Ways to choose tokens.
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 3.0, "top_k": 9, "top_p": 0.9},
    {"do_sample": True, "repetition_penalty": 1.8, "min_p": 0.01, "num_return_sequences": 2},
    {"do_sample": False, "use_cache": False, "no_repeat_ngram_size": 2},
)


def prompts_of(name):
    """Return prompts, some of them padded on the left, and their mask."""
    tokens = torch.randint(3, 31, (5, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(tokens)
    if LEFT in batches_of(name):
        mask[1, :3] = mask[3, :1] = 0
    return tokens * mask, mask


def stage_in_one(name, **options):
    layers = hf.sequential(model_of(name))
    return Stage(layers, [len(layers)], chunks=2, **options)


def plain_of(name):
    """Return the plain model, whose sequences do not end by themselves."""
    model = model_of(name).eval()
    model.config.output_router_logits = False  # transformers cannot generate with it
    return model


def test_greedy_tokens_are_those_of_transformers():
    for name in CAUSAL:
        tokens, mask = prompts_of(name)
        given = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        expected = plain_of(name).generate(tokens, **given)
        stage = stage_in_one(name)

        found = hf.generate(stage, tokens, **given)

        assert found.tolist() == expected.tolist(), name
        assert stage.training, name


def test_all_ways_to_choose_tokens_are_those_of_transformers():
    for name in ("Llama", "Gemma 3"):
        tokens, mask = prompts_of(name)
        stage = stage_in_one(name)
        for way in WAYS:
            given = {"attention_mask": mask, "max_new_tokens": 6, **way}
            plain = plain_of(name)
            torch.manual_seed(7)
            expected = plain.generate(tokens, **given)
            torch.manual_seed(7)
            assert hf.generate(stage, tokens, **given).tolist() == expected.tolist(), (name, way)


class Longest(transformers.StoppingCriteria):
    """Ends all sequences at a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Only(transformers.LogitsProcessor):
    """Leaves one token."""

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -math.inf).index_fill_(1, torch.tensor([17]), 0.0)


class Received(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.tokens.append("end")


def with_code(**options):
    """Return options with the user's own code, and the streamer among them."""
    received = Received()
    return {
        "stopping_criteria": [Longest(10)],
        "logits_processor": [Only()],
        "streamer": received,
        **options,
    }, received


def test_code_of_the_user_runs_on_the_first_rank():
    tokens, _ = prompts_of("GPT-2")
    options, received = with_code(max_new_tokens=9)

    found = hf.generate(stage_in_one("GPT-2"), tokens[:1], **options)

    assert found[0, 7:].tolist() == [17, 17, 17]
    assert received.tokens == [tokens[:1].tolist(), [17], [17], [17], "end"]


def test_modes_of_modules_stay_as_they_were():
    stage = stage_in_one("GPT-2")
    stage[1].eval()
    before = [module.training for module in stage.modules()]

    hf.generate(stage, prompts_of("GPT-2")[0], max_new_tokens=2)

    assert [module.training for module in stage.modules()] == before
    assert {True, False} == {*before}


def test_sequences_end_at_their_own_ends():
    tokens, mask = prompts_of("GPT-2")
    stage = stage_in_one("GPT-2")
    free = hf.generate(stage, tokens, attention_mask=mask, max_new_tokens=9, eos_token_id=99)
    ends = [int(free[0, 9]), int(free[1, 8])]
    given = {"attention_mask": mask, "max_new_tokens": 9, "eos_token_id": ends, "pad_token_id": 0}
    expected = plain_of("GPT-2").generate(tokens, **given)

    found = hf.generate(stage, tokens, **given)

    assert free.shape == (5, 16)
    assert found.tolist() == expected.tolist()
    assert found.tolist() != free.tolist()


def test_the_generation_config_of_the_model_counts():
    tokens, mask = prompts_of("Llama")
    assert not mask.all(), "there are padding tokens, and no mask is given"
    free = hf.generate(stage_in_one("Llama"), tokens, max_new_tokens=8)
    for values in ({}, {"repetition_penalty": 1.8}, {"suppress_tokens": [int(free[0, 7])]}):
        plain, model = plain_of("Llama"), model_of("Llama")
        for each in (plain, model):
            each.generation_config.update(**values)
        expected = plain.generate(tokens, max_new_tokens=8)

        found = hf.generate(Stage(hf.sequential(model), [5], chunks=2), tokens, max_new_tokens=8)

        assert found.tolist() == expected.tolist(), values
        assert torch.equal(found, free) == (not values), values


def test_wrong_arguments_are_refused():
    stage = stage_in_one("GPT-2")
    tokens, mask = prompts_of("GPT-2")
    for arguments, fault in (
        ({"input_ids": None}, "input_ids must be prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens.* must be greater than 0, but is 0"),
        ({"attention_mask": [1]}, "attention_mask must be a tensor, not list"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"attention_mask": mask.flip(1)}, "padded on the left"),
        ({"num_beams": 2}, "cannot do 'beam_search', which changes caches"),
        ({"past_key_values": 1}, "past_key_values: leave out"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate: leave out"),
        ({"no_such_option": True}, "no_such_option"),
    ):
        with pytest.raises((ValueError, TypeError), match=fault):
            hf.generate(stage, **{"input_ids": tokens, "max_new_tokens": 2, **arguments})
    with pytest.raises(TypeError, match="not of a BertForMaskedLM"):
        hf.generate(stage_in_one("BERT, tied"), tokens)


#: With sliding windows, and with states in place of keys and values.
IN_SEVERAL = ("GPT-2", "Gemma 3", "Mamba 2")


def test_several_processes_generate_the_same(ranks):
    expected: list[Any] = []
    for name in IN_SEVERAL:
        tokens, mask = prompts_of(name)
        for way in WAYS:
            plain = plain_of(name)
            torch.manual_seed(7)
            given = {"attention_mask": mask, "max_new_tokens": 6, **way}
            expected.append(plain.generate(tokens, **given).tolist())
        expected.append([[*tokens[0].tolist(), 17, 17, 17]])

    found = ranks(2).run(generated, world=False, timeout_s=60).values()

    assert [of_rank[0] for of_rank in found] == [expected, expected]
    times = [of_rank[1] for of_rank in found]
    assert times == [1, 0], "only the first rank looked at its time"


def generated(bare):
    """Generate with all models; only rank 0 has the arguments, and runs the user's code."""
    found, num_asked = [], [0]

    def failing(*_):
        num_asked[0] += 1
        raise KeyError("of the user")

    for name in IN_SEVERAL:
        layers = hf.sequential(model_of(name))
        with stage_of(bare, name, layers, [2, len(layers) - 2], chunks=2) as stage:
            tokens, mask = prompts_of(name)
            for way in WAYS:
                torch.manual_seed(7 + bare.rank)
                given = {"input_ids": tokens, "attention_mask": mask, "max_new_tokens": 6, **way}
                found.append(hf.generate(stage, **(given if bare.rank == 0 else {})).tolist())
            options, _ = with_code(max_new_tokens=9) if bare.rank == 0 else ({}, None)
            found.append(hf.generate(stage, tokens[:1], **options).tolist())
            if name == "GPT-2":  # what rank 0 raises, all do, and the stage can still be used
                error = KeyError if bare.rank == 0 else ValueError
                with pytest.raises(error, match="of the user"):
                    hf.generate(stage, tokens, max_new_tokens=3, stopping_criteria=[failing])
    return found, num_asked[0]


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
    for way in WAYS[:2]:
        torch.nn.init.constant_(last, float("nan"))
        with pytest.raises(ValueError, match="logits of sequence 0 are NaN after 7 tokens"):
            hf.generate(stage, tokens, max_new_tokens=2, **way)
        with torch.no_grad():
            last.copy_(before)
        assert hf.generate(stage, tokens, max_new_tokens=2).tolist() == expected, way
