"""The examples, run as a user would: they learn, and any number of stages prints the same.

So no example of procpipe may have a branch on the rank: their source is searched for that.
"""

from __future__ import annotations

import io
import shutil
import tokenize
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases import for_each
from tests.dist.forks import OF_EXAMPLES, OF_HF, fork_server
from tests.dist.script import run_forked

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples/train_digits.py"
LM = ROOT / "examples/train_lm.py"
HF = ROOT / "examples/finetune_hf.py"
UNET = ROOT / "examples/unet_segmentation.py"
TINY = ROOT / "examples/tiny_pipeline.py"  # shows what procpipe does; it does not use it


def results(stdout):
    """Return all lines except the first, which has the balance, and the tables of the stages."""
    found = []
    is_table = False
    for line in stdout.splitlines()[1:]:
        is_table = bool(line.strip()) and (is_table or line.startswith(("stage", "the last step")))
        if line.strip() and not is_table:
            found.append(line)
    return found


def without_balance(stdout):
    return [line for line in stdout.splitlines() if line and ", balance [" not in line]


def run(example, *, args, nproc=None, balance=()):
    fork_server().load(*OF_EXAMPLES)
    options = [*args]
    if balance:
        options += ["--balance", *map(str, balance)]
    return run_forked(example, num_ranks=nproc, args=options).check()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.on_gpus(3)
def test_three_stages_print_the_same_as_one():
    few = ["--steps", "3", "--evaluate-every", "3", "--batch-size", "4", "--generate", "12"]
    alone = results(run(LM, args=few).stdout)

    assert alone
    assert results(run(LM, nproc=3, balance=[1, 5, 1], args=few).stdout) == alone


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.on_gpus(3)
@pytest.mark.timeout(400)  # a busy machine
def test_digits_are_learned_and_an_interrupted_run_ends_the_same_on_fewer_stages(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    args = ["--epochs", "1", "--save-every", "10", "--save"]
    lines = results(run(DIGITS, nproc=3, balance=[7, 8, 1], args=[*args, str(whole)]).stdout)
    assert lines[-1].startswith("epoch  1")
    assert float(lines[-1].rsplit(maxsplit=1)[1].rstrip("%")) >= 90.0
    shutil.copytree(whole, resumed)
    *_, older, old, new = sorted(resumed.iterdir())
    shutil.rmtree(old)
    shutil.rmtree(new)

    done = run(DIGITS, args=[*args, str(resumed)])

    assert f"resumed after {older.name.rpartition('-')[2]} steps" in done.stdout
    assert results(done.stdout)[-1] == lines[-1]


@pytest.mark.dist
@pytest.mark.slow
def test_a_language_model_is_trained_resumed_and_adapted(tmp_path):
    fork_server().load(*OF_HF)
    few = ["--batch-size", "4", "--every", "2", "--paragraphs", "60", "--generate", "4"]
    saving = [*few, "--state", str(tmp_path / "state")]
    out, adapter = tmp_path / "out", tmp_path / "adapter"

    whole = run(HF, args=[*few, "--steps", "4"])
    first = run(HF, args=[*saving, "--steps", "2"])
    resumed = run(HF, nproc=2, args=[*saving, "--steps", "4", "--out", str(out)])
    lora = ["--model", str(out), "--lora", "--out", str(adapter), "--steps", "2"]
    run(HF, nproc=2, args=[*few, *lora])

    printed, before, after = (without_balance(done.stdout) for done in (whole, first, resumed))
    assert before[:1] + after == printed, "resumed on another number of stages"
    assert (adapter / "adapter_config.json").is_file()


@pytest.mark.dist
@pytest.mark.slow
def test_a_unet_learns_and_two_stages_print_and_draw_the_same_as_one(tmp_path):
    args = ["--steps", "6", "--evaluate-every", "3", "--batch-size", "2", "--chunks", "2"]
    pictures, lines = [], []
    for num_ranks, balance in ((None, [41]), (2, [9, 32])):
        picture = tmp_path / f"{num_ranks}.png"
        done = run(UNET, nproc=num_ranks, balance=balance, args=[*args, "--picture", str(picture)])
        lines.append([line for line in done.stdout.splitlines() if "IoU" in line])
        with Image.open(picture) as image:
            pictures.append(np.asarray(image.convert("RGB")).astype(int))

    assert lines[0] == lines[1]
    losses = [float(line.split()[3]) for line in lines[0] if line.startswith("step")]
    assert losses[1] < losses[0]
    assert np.abs(pictures[0] - pictures[1]).max() <= 1
    *_, before, after = np.array_split(pictures[0], 4, axis=1)
    assert np.abs(before - after).mean() > 10


#: The example with a smaller model; its own size: tests/examples/test_models.py.
SMALL_RESNET = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from examples.models import resnet
resnet.resnet101 = lambda num_classes: resnet.resnet(num_classes, (1, 1, 1, 1), 8)
runpy.run_path({str(ROOT / "examples/resnet_split_size.py")!r}, run_name="__main__")
"""


@pytest.mark.dist
@pytest.mark.slow
def test_the_split_size_is_swept_and_drawn(tmp_path):
    picture = tmp_path / "resnet.png"
    args = ["--image-size", "32", "--batch-size", "4", "--split-size", "2", "--sweep", "4"]
    args += ["--repeats", "2", "--picture", str(picture)]
    done = run(SMALL_RESNET, nproc=2, args=args)

    lines = done.stdout.splitlines()
    start = next(k for k, line in enumerate(lines) if "speed-up" in line)
    rows = [line.rsplit(maxsplit=4) for line in lines[start + 1 : start + 5]]
    assert [(name, size) for name, size, *_ in rows] == [
        *(("one device", "4"), ("model parallel", "4")),
        *(("pipelined", "2"), ("pipelined", "4")),
    ]
    assert all(float(mean) > 0 and float(deviation) > 0 for _, _, mean, deviation, _ in rows)
    with Image.open(picture) as image:
        assert np.asarray(image).std() > 10


@pytest.mark.dist
def test_an_ordinary_gpt_is_cut_as_it_is():
    plain, cut = ROOT / "examples/train_nanogpt_plain.py", ROOT / "examples/train_nanogpt.py"
    texts = [path.read_text() for path in (plain, cut)]
    classes = [text[text.index("class Block") : text.index("def main")] for text in texts]
    assert classes[0] == classes[1]
    assert len(texts[1].splitlines()) <= len(texts[0].splitlines()) + 10
    few = ["--steps", "4", "--batch-size", "4"]

    expected = run_forked(plain, args=few).check().stdout
    found = run_forked(cut, num_ranks=2, args=few).check().stdout

    assert expected.startswith("step    4   bits per byte")
    assert without_balance(found) == expected.splitlines()


@for_each("example", sorted({*ROOT.glob("examples/*.py")} - {TINY}), ids=lambda path: path.stem)
def test_no_example_uses_its_rank(example):
    code = '"""Of every rank."""\nlocal_rank = int(os.environ["RANK"])\n'
    assert words_with_rank(code) == ["local_rank", '"RANK"']
    assert words_with_rank(example.read_text()) == []


def words_with_rank(code):
    """Return the names and strings in code that have a rank; docstrings and comments apart."""
    return [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if "rank" in token.string.lower()
        and token.type != tokenize.COMMENT
        and not token.string.startswith('"""')
    ]
