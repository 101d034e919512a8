"""``procpipe plan --hf FOLDER``, for small random configurations, without weights."""

from __future__ import annotations

import re
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from procpipe import hf
from procpipe.balance import Inputs, profile_layers
from procpipe.launch.main import main
from procpipe.launch.plan.folder import AttentionOfGpus, load_folder
from procpipe.planner.costs import Table
from tests.hf.cases import CASES, config_of
from tests.launch.plan.test_plan import check_mistake


def write(name: str, case: str, dropout: float = 0.0, **values: Any) -> Any:
    """Write a folder with a configuration only, and return that."""
    config = config_of(case, dropout)
    config.architectures = ["".join(CASES[case][:2])]
    config.num_hidden_layers = 2  # blocks, which are alike
    for key, value in values.items():
        setattr(config, key, value)
    config.save_pretrained(name)
    assert [path.name for path in Path(name).iterdir()] == ["config.json"]
    return config


def estimated(folder: str, batch: int, length: int, *, of_gpus: bool = False) -> Table:
    subject, _, _ = load_folder(folder, batch, length, "")
    inputs, target = subject.of_size(batch)
    options = {"target": target, "loss_fn": subject.loss_fn, "flops_per_s": 1.0}
    if of_gpus:
        with AttentionOfGpus():
            return profile_layers(subject.model, inputs, **options)
    return profile_layers(subject.model, inputs, **options)


def bytes_of(profile: Table) -> Any:
    """Return all that a profile has but seconds."""
    values = asdict(profile)
    for layer in (*values["layers"], values["loss"]):
        del layer["seconds"]
    return values


def test_bytes_are_those_of_the_real_model_with_padding() -> None:
    for case, dropout in [("Llama", 0.0), ("GPT-2", 0.1), ("BERT, tied", 0.1)]:
        config = write(case, case, dropout, tie_word_embeddings=True)
        subject, _, _ = load_folder(case, 3, 9, "")
        mask = torch.ones(3, 9, dtype=torch.long)
        mask[1, -3:] = 0
        batch = {name: torch.ones_like(mask) for name in subject.inputs.values[0]}
        batch["attention_mask"] = mask
        model = getattr(transformers, "".join(CASES[case][:2]))(config)
        labels = torch.ones(subject.target.shape, dtype=torch.long)

        measured = profile_layers(
            hf.sequential(model), Inputs(batch), target=labels, loss_fn=subject.loss_fn, timeout=0
        )

        assert bytes_of(estimated(case, 3, 9)) == bytes_of(measured), case


def test_seconds_are_flops_by_their_rate() -> None:
    config = write("llama", "Llama")
    write("experts", "Mixtral", dtype=torch.bfloat16, intermediate_size=24,
          experts_implementation="grouped_mm")  # fmt: skip
    h, heads, tokens, length = config.hidden_size, config.num_attention_heads, 2 * 8, 8
    attention = 2 * tokens * (2 * h * h + 2 * h * h // 2) + 4 * tokens * length * h
    assert heads == 2 * config.num_key_value_heads

    llama, experts = (estimated(folder, 2, length) for folder in ("llama", "experts"))

    forward_s = [attention + 2 * tokens * 3 * h * config.intermediate_size] * 2
    assert [layer.seconds["F"] for layer in llama.layers] == [0, *forward_s, 2 * tokens * h * 31]
    assert [layer.seconds["B"] for layer in llama.layers[1:3]] == [2 * s for s in forward_s]
    assert [layer.seconds["I"] for layer in llama.layers[1:3]] == forward_s
    # Each token goes through 2 of 4 experts.
    assert experts.layers[1].seconds["F"] == attention + 2 * tokens * (4 * h + 2 * 3 * h * 24)


def test_dropout_of_attention_keeps_no_scores_on_gpus() -> None:
    write("none", "Llama")
    write("some", "Llama", 0.1)
    plain, dropped = (estimated(folder, 1, 32, of_gpus=True) for folder in ("none", "some"))

    assert plain.layers[1].kept_bytes == dropped.layers[1].kept_bytes
    assert estimated("some", 1, 32).layers[1].kept_bytes > dropped.layers[1].kept_bytes


def test_a_folder_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for case, loss in {"Llama": "hf.causal_lm_loss", "BERT": "F.cross_entropy"}.items():
        write(case, case)
        words = ("--hf", case, "-n", "2", "--chunks", "2", "--memory", "1GiB")

        assert main(["plan", *words]) == 0, case

        printed = capsys.readouterr().out
        line = printed.rstrip().rpartition("\n")[2]
        match = re.fullmatch(r"stage = Stage\((.*), balance=\[(.*?)\], .*, loss_fn=(.*)\)", line)
        assert match, printed
        assert (match[1], match[3]) == ("hf.sequential(model)", loss)
        assert sum(map(int, match[2].split(","))) == 4
        assert "micro-batches of 2, 4 samples are tried" in printed  # of two replicas, and of one
        assert {"2 x 1", "1 x 2"} >= set(re.findall(r" (\d x \d) ", printed)) != set()
        assert "times are estimated, not measured" in printed
        assert "FLOPs at 300 TFLOP/s (--flops)" in printed


def test_a_model_of_any_size_needs_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    write("large", "Llama", hidden_size=1 << 15, intermediate_size=1 << 17, head_dim=128,
          num_attention_heads=256, vocab_size=1 << 17, max_position_embeddings=1 << 16)  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert main(["plan", "--hf", "large", "-n", "2", "--chunks", "8", "--flops", "2e14"]) == 0

    printed = capsys.readouterr().out
    h = 1 << 15
    of_block = 2 * h * h + 2 * h * 256 + 3 * h * (1 << 17) + 2 * h
    assert f"{2 * of_block + 2 * h * (1 << 17) + h:,} parameters, float32" in printed
    assert "FLOPs at 200 TFLOP/s (--flops)" in printed
    assert "transfers: 20.0 GB/s (another: --bandwidth)" in printed
    assert "samples of 1024 tokens" in printed
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 1 << 30


def test_each_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    write("llama", "Llama")
    write("experts", "Mixtral")
    transformers.ViTConfig(architectures=["ViTModel"]).save_pretrained("vit")
    transformers.BartConfig().save_pretrained("bart")
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken", "config.json").write_text("{")
    Path("wrong").mkdir()
    Path("wrong", "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    here = ("--hf", "llama", "-n", "2")
    mistakes = [
        (("--hf", "empty", "-n", "2"), "there is no file empty/config.json; nothing is downloaded"),
        (("--hf", "gpt2", "-n", "2"), "there is no file gpt2/config.json"),
        (("--hf", "", "-n", "2"), "--hf : there is no file config.json"),
        (("--hf", "broken", "-n", "2"), "--hf broken: "),
        (
            ("--hf", "wrong", "-n", "2"),
            "Validation error for field 'hidden_size': TypeError: ",
        ),
        (("--hf", "vit", "-n", "2"), "ViTConfig"),
        (("--hf", "bart", "-n", "2"), "its model has an encoder: plan mymodel:build --any"),
        ((*here, "--check"), "--check runs the model, so it needs MODULE:NAME"),
        ((*here, "--costs", "x"), "argument --costs: not allowed with argument --hf"),
        ((*here, "--length", "33"), "--length 33: the model has 32 positions"),
        ((*here, "--loss", "nowhere:x"), "the loss, nowhere:x, cannot be imported"),
        ((*here, "--loss", "torch.nn.functional:relu"), "without values (while layer '(loss)'"),
        (("--costs", "x", "--length", "9", "-n", "2"), "--length and --flops are for a folder"),
    ]
    for words, message in mistakes:
        check_mistake(words, message, capsys)
