"""The models of the published benchmarks, each a flat ``nn.Sequential`` that can be cut anywhere.

Every layer has a name that shows its place, and every connection that passes over layers is a skip
tensor (``procpipe.skip``), so any balance is possible.

    unet         U-Net (B, C): skip tensors over most of the model
    amoebanet    AmoebaNet-D (L, D): two tensors between the layers
    resnet       ResNet-101: skip tensors over a few layers
    gpt          GPT: one tensor between the layers, all of one shape
"""
