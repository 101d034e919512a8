"""Generated tokens are transformers' own, for any number of stages."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from procpipe import Stage, hf
from tests.dist.stages import stage_of
from tests.hf.cases import model_of
from tests.hf.compare import plain_of, prompts_of

#: Ways to choose tokens.
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 3.0, "top_k": 9, "top_p": 0.9},
    {"do_sample": True, "repetition_penalty": 1.8, "min_p": 0.01, "num_return_sequences": 2},
    {"do_sample": False, "use_cache": False, "no_repeat_ngram_size": 2},
    {"do_sample": False, "max_time": 1e-9},  # is over after one token
)


def stage_in_one(name, **options):
    layers = hf.sequential(model_of(name))
    return Stage(layers, [len(layers)], chunks=2, **options)


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


def test_modes_of_modules_stay_as_they_were():
    stage = stage_in_one("GPT-2")
    stage[1].eval()
    before = [module.training for module in stage.modules()]

    hf.generate(stage, prompts_of("GPT-2")["input_ids"], max_new_tokens=2)

    assert [module.training for module in stage.modules()] == before
    assert {True, False} == {*before}


def test_wrong_arguments_are_refused():
    stage = stage_in_one("GPT-2")
    tokens, mask = prompts_of("GPT-2").values()
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


#: The second has sliding windows.
IN_SEVERAL = ("GPT-2", "Gemma 3")


def test_several_processes_generate_the_same(ranks):
    expected: list[Any] = []
    for name in IN_SEVERAL:
        tokens, mask = prompts_of(name).values()
        for way in WAYS:
            plain = plain_of(name)
            torch.manual_seed(7)
            given = {"attention_mask": mask, "max_new_tokens": 6, **way}
            expected.append(plain.generate(tokens, **given).tolist())
        assert len(expected[-1][0]) == 8, "max_time ends it"
        expected.append([[*tokens[0].tolist(), 17, 17, 17]])

    found, others = ranks(2).run(generated, world=False, timeout_s=60).values()

    assert found[0] == others[0] == expected
    first = prompts_of("Gemma 3")["input_ids"][:1].tolist()
    assert (found[1], others[1]) == ([first, [17], [17], [17], "end"], [])
    assert (found[2], others[2]) == (1, 0), "only the first rank asked the user's code"


def generated(bare):
    """Generate with all models; only rank 0 has the arguments, and runs the user's code."""
    found, received, num_asked = [], Received(), [0]

    def failing(*_):
        num_asked[0] += 1
        raise KeyError("of the user")

    for name in IN_SEVERAL:
        layers = hf.sequential(model_of(name))
        with stage_of(bare, name, layers, [2, len(layers) - 2], chunks=2) as stage:
            tokens, mask = prompts_of(name).values()
            for way in WAYS:
                torch.manual_seed(7 + bare.rank)
                given = {"input_ids": tokens, "attention_mask": mask, "max_new_tokens": 6, **way}
                found.append(hf.generate(stage, **(given if bare.rank == 0 else {})).tolist())
            received.tokens.clear()
            code = {
                "stopping_criteria": [transformers.MaxLengthCriteria(10)],
                "logits_processor": [Only()],
            }
            options = {**code, "streamer": received, "max_new_tokens": 9}
            options = options if bare.rank == 0 else {}
            found.append(hf.generate(stage, tokens[:1], **options).tolist())
            if name == "GPT-2":  # what rank 0 raises, all do, and the stage can still be used
                error = KeyError if bare.rank == 0 else ValueError
                with pytest.raises(error, match="of the user"):
                    hf.generate(stage, tokens, max_new_tokens=3, stopping_criteria=[failing])
    return found, received.tokens, num_asked[0]


def test_replicas_generate_the_same(ranks):
    expected = [of_replica(replica, plain_of("GPT-2").generate) for replica in range(2)]

    found = ranks(4).run(generated_by_replicas, world=False, timeout_s=60).values()
    assert found == [expected[0], expected[0], expected[1], expected[1]]


def of_replica(replica, generate):
    """Continue sequences of a replica's own."""
    tokens, mask = prompts_of("GPT-2").values()
    found = []
    for num, options in ((5 - replica, WAYS[0]), (4, WAYS[1])):
        torch.manual_seed(7 + replica)
        given = {"attention_mask": mask[:num], "max_new_tokens": 6, **options}
        found.append(generate(tokens[:num], **given).tolist())
    return found


def generated_by_replicas(bare):
    layers = hf.sequential(model_of("GPT-2"))
    with stage_of(bare, "replicas", layers, [2, 3], chunks=2, replicas=2) as stage:
        return of_replica(stage.replica, partial(hf.generate, stage))


def test_logits_that_are_nan_end_generation_on_every_rank():
    stage = stage_in_one("GPT-2")
    tokens, _ = prompts_of("GPT-2").values()
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
