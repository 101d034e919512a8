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
from tests.hf.cases import model_of
from tests.hf.compare import plain_of, prompts_of

#: Ways to choose tokens.
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 3.0, "top_k": 9, "top_p": 0.9},
    {"do_sample": True, "repetition_penalty": 1.8, "min_p": 0.01, "num_return_sequences": 2},
    {"do_sample": False, "use_cache": False, "no_repeat_ngram_size": 2},
    {"do_sample": False, "cache_implementation": "static", "prefill_chunk_size": 3},
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
    tokens = prompts_of("GPT-2")["input_ids"]

    hf.generate(stage, tokens, max_new_tokens=2)

    assert [module.training for module in stage.modules()] == before
    assert {True, False} == {*before}
    assert stage(input_ids=tokens).shape[:2] == tokens.shape, "logits of all positions again"


def test_wrong_arguments_are_refused():
    stage = stage_in_one("GPT-2")
    tokens = prompts_of("GPT-2")["input_ids"]
    in_config = transformers.GenerationConfig(num_beams=2)
    for arguments, fault in (
        ({"input_ids": None}, "rank 0 must give prompts"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"generation_config": in_config}, r"cannot do beams .* \(this would be beam_search\)"),
        ({"past_key_values": 1}, "continue a cache"),
        ({"return_dict_in_generate": True}, "other results than tokens"),
        ({"no_such_option": True}, "no_such_option"),
    ):
        with pytest.raises((ValueError, TypeError), match=fault):
            hf.generate(stage, **{"input_ids": tokens, "max_new_tokens": 2, **arguments})


#: The second has sliding windows.
IN_SEVERAL = ("GPT-2", "Gemma 3")


def test_several_processes_generate_the_same(ranks):
    """Two replicas of two stages, each with prompts of its own."""
    expected = [expected_of(replica) for replica in range(2)]
    first = prompts_of("Gemma 3")["input_ids"][:1].tolist()

    parts = ranks(4).run(generated, world=False, timeout_s=60).values()

    for rank, (found, received, num_asked) in enumerate(parts):
        assert found == expected[rank // 2]
        if rank % 2 == 0:
            assert (received, num_asked) == ([first, [17], [17], [17], "end"], 1)
        else:
            assert (received, num_asked) == ([], 0), "only the first rank runs the user's code"


def expected_of(replica):
    """Return what transformers generates, by model and way."""
    found: list[Any] = []
    for name in IN_SEVERAL:
        tokens, mask = (value[: 5 - replica] for value in prompts_of(name).values())
        plain = plain_of(name)
        for way in WAYS:
            torch.manual_seed(7)
            given = {"attention_mask": mask, "max_new_tokens": 6, **way}
            found.append(plain.generate(tokens, **given).tolist())
        assert len(found[-1][0]) == 8, "max_time ends it"
        found.append([[*tokens[0].tolist(), 17, 17, 17]])
    return found


def generated(bare):
    """Generate with all models; only first ranks have the arguments, and run the user's code."""
    found, received, num_asked = [], Received(), [0]
    replica, stage_index = divmod(bare.rank, 2)

    def failing(*_):
        num_asked[0] += 1
        raise KeyError("of the user")

    for name in IN_SEVERAL:
        layers, options = hf.sequential(model_of(name)), {"chunks": 2, "replicas": 2}
        with stage_of(bare, name, layers, [2, len(layers) - 2], **options) as stage:
            tokens, mask = (value[: 5 - replica] for value in prompts_of(name).values())
            for way in WAYS:
                torch.manual_seed(7 + stage_index)
                given = {"input_ids": tokens, "attention_mask": mask, "max_new_tokens": 6, **way}
                found.append(hf.generate(stage, **({} if stage_index else given)).tolist())
            received.tokens.clear()
            code: dict[str, Any] = {
                "stopping_criteria": [transformers.MaxLengthCriteria(10)],
                "logits_processor": [Only()],
                "streamer": received,
                "max_new_tokens": 9,
            }
            found.append(hf.generate(stage, tokens[:1], **({} if stage_index else code)).tolist())
            if name == "GPT-2":  # what rank 0 raises, all do, and the stage can still be used
                with pytest.raises(ValueError if stage_index else KeyError, match="of the user"):
                    hf.generate(stage, tokens, max_new_tokens=3, stopping_criteria=[failing])
    return found, received.tokens, num_asked[0]


def test_logits_that_are_nan_end_generation_on_every_rank():
    stage = stage_in_one("GPT-2")
    tokens, _ = prompts_of("GPT-2").values()
    torch.nn.init.constant_(stage[4].transformer.ln_f.weight, float("nan"))
    with pytest.raises(ValueError, match="logits are NaN, so there is no next token"):
        hf.generate(stage, tokens, max_new_tokens=2)
