"""The examples that write a picture, run as a user would at small sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.dist.forks import fork_server
from tests.dist.script import run_forked

ROOT = Path(__file__).parents[2]
UNET = ROOT / "examples/unet_segmentation.py"
RESNET = ROOT / "examples/resnet_split_size.py"

UNET_ARGS = ["--steps", "18", "--evaluate-every", "6", "--batch-size", "4", "--chunks", "2"]
RESNET_ARGS = ["--image-size", "32", "--batch-size", "4", "--split-size", "2", "--sweep", "4"]
RESNET_ARGS += ["--repeats", "2"]

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def drawing_is_loaded():
    """Import once what all examples here draw with."""
    fork_server().load("matplotlib.figure", "matplotlib.backends.backend_agg")


def lines_of(done, picture):
    """Return the lines that an example printed; it ran in another folder than the project's."""
    done.check()
    assert [*picture.parent.iterdir()] == [picture], "no unfinished file is left"
    return done.stdout.splitlines()


def pixels(picture):
    """Read a picture as numbers, ``(height, width, 3)``."""
    with Image.open(picture) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def progress(lines):
    return [line for line in lines if "IoU" in line]


def test_a_unet_learns_and_two_stages_print_and_draw_the_same_as_one(tmp_path):
    in_one, in_two = tmp_path / "one/unet.png", tmp_path / "two/unet.png"
    for picture in (in_one, in_two):
        picture.parent.mkdir()

    args = [*UNET_ARGS, "--balance", "9", "32", "--picture", str(in_two)]
    lines = lines_of(run_forked(UNET, num_ranks=2, args=args, tears_down=True), in_two)

    losses = [float(line.split()[3]) for line in lines if line.startswith("step")]
    assert len(losses) == 3
    assert losses[2] < 0.9 * losses[0]
    image = pixels(in_two)
    assert image.shape == (540, 1400, 3)
    seen, _, before, after = np.array_split(image, 4, axis=1)
    assert min(panel.std() for panel in (seen, before, after)) > 10
    assert np.abs(before - after).mean() > 10

    args = [*UNET_ARGS, "--picture", str(in_one)]
    lines_of_one = lines_of(run_forked(UNET, args=args), in_one)

    assert progress(lines_of_one) == progress(lines)
    assert len(progress(lines_of_one)) == 5
    assert np.abs(pixels(in_one) - image).max() <= 1


def test_the_split_size_is_swept_and_drawn(tmp_path):
    picture = tmp_path / "resnet.png"

    args = [*RESNET_ARGS, "--picture", str(picture)]
    lines = lines_of(run_forked(RESNET, num_ranks=2, args=args), picture)

    start = next(k for k, line in enumerate(lines) if "speed-up" in line)
    rows = [line.rsplit(maxsplit=4) for line in lines[start + 1 : start + 5]]
    assert [(name, size) for name, size, *_ in rows] == [
        ("one device", "4"),
        ("model parallel", "4"),
        ("pipelined", "2"),
        ("pipelined", "4"),
    ]
    assert all(float(mean) > 0 and float(deviation) > 0 for _, _, mean, deviation, _ in rows)
    image = pixels(picture)
    assert image.shape == (500, 1200, 3)
    assert image.std() > 10


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--batch-size", "6", "--split-size", "4"], "4 does not divide the 6 images"),
        (["--repeats", "1"], "2 repeats or more"),
    ],
)
def test_arguments_that_cannot_be_measured_are_refused(args, fault):
    done = run_forked(RESNET, args=args)

    assert done.returncode == 2
    assert fault in done.stderr
