"""The published experiments of torchgpipe and GPipe, each a part of ``python -m benchmarks``.

    unet_speed          U-Net (5, 64) on 1, 2, 4 and 8 devices
    unet_memory         how large a U-Net (B, C) as many devices hold
    amoebanet_speed     AmoebaNet-D (18, 256), 2, 4 and 8 devices by 1, 4 and 32 micro-batches
    amoebanet_memory    how large an AmoebaNet-D (L, D) as many devices hold
    resnet_speed        ResNet-101 on 1, 2, 4 and 8 devices
    resnet_accuracy     whether a model learns the same with and without the pipeline
    ablation            what each component of the pipeline is worth, with its timeline

By default each is scaled down to what two cores do in a minute or two. ``--full`` takes the
published sizes, mini-batches and balances, and needs as many GPUs as there are stages.

Published figures are in ``figures.py``; the tables show them beside what is measured here.
"""
