"""Published figures, to be compared with what is measured here.

Sources:

torchgpipe      its documentation's page "Benchmarks", for torchgpipe 0.0.5, Python 3.6.9,
                PyTorch 1.3.0, CUDA 10.1 and Tesla P40 GPUs of 24 GB (accuracy: 0.0.3 and PyTorch
                1.2.0): https://github.com/kakaobrain/torchgpipe/blob/fe52c4d/docs/benchmarks.rst
                The ablation: https://github.com/kakaobrain/torchgpipe, benchmarks/unet-timeline.
                Both are described in Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for
                Training Giant Models" (2020), https://arxiv.org/abs/2004.09910.
Huang et al.    "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
                (2019), https://arxiv.org/abs/1811.06965, on Cloud TPUs; as quoted on that page.
Goyal et al.    "Accurate, Large Minibatch SGD" (2017), https://arxiv.org/abs/1706.02677, Table
                2(c); as quoted on that page.
"""

from __future__ import annotations

from dataclasses import dataclass

#: For the notes under tables.
TORCHGPIPE = "torchgpipe 0.0.5 on Tesla P40 GPUs (its documentation's page Benchmarks)"


@dataclass(frozen=True)
class Speed:
    """A row of a table of speed.

    Attributes:
        samples_per_s: torchgpipe's throughput.
        speed_up: torchgpipe's, over the table's first row.
        huang_speed_up: that of Huang et al., over the table's first row.
    """

    samples_per_s: float
    speed_up: float
    huang_speed_up: float | None = None


@dataclass(frozen=True)
class Memory:
    """A row of a table of memory, summed over all devices.

    Attributes:
        size: of the model, (B, C) or (L, D).
        num_parameters: torchgpipe's.
        total_gib: all memory that torchgpipe used; None where it ran out of it.
        model_gib: the part for parameters, gradients and the optimizer's state.
        activation_gib: the rest.
        huang_activation_gb: peak activation memory of Huang et al., in GB.
    """

    size: tuple[int, int]
    num_parameters: float
    total_gib: float | None = None
    model_gib: float | None = None
    activation_gib: float | None = None
    huang_activation_gb: float | None = None


@dataclass(frozen=True)
class Accuracy:
    """Top-1 errors of ResNet-101 on ImageNet in percent, mean and standard deviation.

    Attributes:
        torchgpipe: with the pipeline.
        data_parallel: without it, ``nn.DataParallel``; None where memory ran out.
        goyal: what Goyal et al. reached.
    """

    torchgpipe: tuple[float, float]
    data_parallel: tuple[float, float] | None = None
    goyal: tuple[float, float] | None = None


@dataclass(frozen=True)
class Ablation:
    """A row of the ablation.

    Attributes:
        components: torchgpipe's names for them.
        samples_per_s: throughput on 4 GPUs.
        utilization: mean share of time that the GPUs were busy.
        memory_gib: of all GPUs.
    """

    components: str
    samples_per_s: float
    utilization: float
    memory_gib: float


#: U-Net (5, 64), images of 192 x 192.
UNET_SPEED = {
    "baseline": Speed(28.500, 1.0),
    "pipeline-1": Speed(24.456, 0.858),
    "pipeline-2": Speed(35.502, 1.246),
    "pipeline-4": Speed(67.042, 2.352),
    "pipeline-8": Speed(88.497, 3.105),
}

#: AmoebaNet-D (18, 256), images of 224 x 224.
AMOEBANET_SPEED = {
    "n=2, m=1": Speed(26.733, 1.0, 1.0),
    "n=2, m=4": Speed(41.133, 1.539, 1.07),
    "n=2, m=32": Speed(47.386, 1.773, 1.21),
    "n=4, m=1": Speed(26.827, 1.004, 1.13),
    "n=4, m=4": Speed(44.543, 1.666, 1.26),
    "n=4, m=32": Speed(72.412, 2.709, 1.84),
    "n=8, m=1": Speed(24.918, 0.932, 1.38),
    "n=8, m=4": Speed(70.065, 2.621, 1.72),
    "n=8, m=32": Speed(132.413, 4.953, 3.48),
}

#: ResNet-101, images of 224 x 224. Huang et al. show a figure, from which torchgpipe's page reads.
RESNET_SPEED = {
    "baseline": Speed(95.862, 1.0, 1.0),
    "pipeline-1": Speed(81.796, 0.853, 0.80),
    "pipeline-2": Speed(135.539, 1.414, 1.42),
    "pipeline-4": Speed(265.958, 2.774, 2.18),
    "pipeline-8": Speed(411.662, 4.294, 2.89),
}

#: U-Net (B, C), 32 images of 192 x 192.
UNET_MEMORY = {
    "baseline": Memory((6, 72), 362.2e6, 20.3),
    "pipeline-1": Memory((11, 128), 2.21e9, 20.5),
    "pipeline-2": Memory((24, 128), 4.99e9, 43.4),
    "pipeline-4": Memory((24, 160), 7.80e9, 79.1),
    "pipeline-8": Memory((48, 160), 15.82e9, 154.1),
}

#: AmoebaNet-D (L, D), 128 images of 224 x 224; the total is the sum of the two published.
AMOEBANET_MEMORY = {
    "baseline": Memory((18, 208), 81.5e6, None, 0.91, None, 6.26),
    "pipeline-1": Memory((18, 416), 319.0e6, 4.48, 3.57, 0.91, 3.46),
    "pipeline-2": Memory((18, 544), 542.7e6, 9.46, 6.07, 3.39, 8.11),
    "pipeline-4": Memory((36, 544), 1.06e9, 18.71, 11.80, 6.91, 15.21),
    "pipeline-8": Memory((72, 512), 1.84e9, 31.45, 20.62, 10.83, 26.24),
}

#: By the size of a mini-batch.
ACCURACY = {
    256: Accuracy((21.99, 0.13), (22.02, 0.11), (22.08, 0.06)),
    1024: Accuracy((22.24, 0.19), (22.04, 0.24)),
    4096: Accuracy((22.13, 0.09)),
}

#: U-Net (5, 64), 128 images of 192 x 192 in 8 micro-batches on 4 GPUs.
ABLATION = [
    Ablation("none", 30.662, 0.44, 52.2),
    Ablation("Dependency", 41.306, 0.59, 19.1),
    Ablation("Dependency + Streams", 55.191, 0.71, 30.0),
    Ablation("Dependency + Streams + Portals", 58.477, 0.75, 23.5),
]
