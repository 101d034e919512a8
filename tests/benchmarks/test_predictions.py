"""The table of predicted and measured steps."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.predictions import WORKLOADS, tabulate


def test_all_runs_are_in_the_table() -> None:
    predicted_s = {"gpipe": 0.100, "1f1b": 0.200}
    runs: list[dict[str, Any]] = [
        {"workload": "mlp", "launch": k, "predicted_s": predicted_s, "times": times}
        for k, times in enumerate(
            (
                {"gpipe": [0.090, 0.110, 0.105], "1f1b": [0.2, 0.2, 0.2]},
                {"gpipe": [0.100, 0.100, 0.100], "1f1b": [0.16, 0.18, 0.19]},
            )
        )
    ]

    table = tabulate(runs)

    rows = [[row[0], row[1], round(float(row[-1]), 6), row[4]] for row in table.rows]  # type: ignore[arg-type]
    assert rows == [
        ["mlp, gpipe", 0, 5.0, "90.0-110.0"],
        ["mlp, 1f1b", 0, 0.0, "200.0-200.0"],
        ["mlp, gpipe", 1, 0.0, "100.0-100.0"],
        ["mlp, 1f1b", 1, -10.0, "160.0-190.0"],
    ]
    assert "of 4 differences the median is 2.5%, and the largest 10.0%" in table.to_text()


def test_there_are_six_workloads_whose_losses_are_numbers() -> None:
    assert list(WORKLOADS) == ["gpt", "unet", "mlp", "resnet", "hf", "uneven"]
    for name in ("gpt", "mlp", "resnet", "uneven"):
        workload = WORKLOADS[name]
        input, target = workload.micro_batch(workload.samples)
        with torch.no_grad():
            assert workload.loss_fn(workload.model()(input), target).dim() == 0, name
