"""Residual networks for small images (He et al., CVPR 2016), as compared on Digits and Office-Caltech.

The stem is 3 x 3 with stride 1, without max-pooling. Four groups of basic blocks follow, with 1, 2, 4 and 8 times
`width` channels and strides 1, 2, 2, 2. Where the shape changes, the shortcut is a 1 x 1 convolution with batch
normalisation. The end is the mean over all positions and one linear layer. Any input size fits. The 10-layer network
with width 64 and ten classes has 4,903,242 parameters, all of them trained. The unused projection head of some
published versions is left out. The numbers of blocks are those of the paper's group's code, in which "resnet20" has 22
layers.
"""

import torch
from torch import nn

from fedheal.models.fork import apply_fork
from fedheal.models.fused_norm import norm_relu

BLOCKS = {10: (1, 1, 1, 1), 12: (2, 1, 1, 1), 18: (2, 2, 2, 2), 20: (1, 3, 3, 3), 34: (3, 4, 6, 3)}


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv, norm = self.shortcut if len(self.shortcut) else (None, None)
        inner, shortcut = apply_fork(self.conv1, conv, x)
        inner = norm_relu(self.norm1, inner)
        if norm is not None:
            shortcut = norm_relu(norm, shortcut, relu=False)
        return norm_relu(self.norm2, self.conv2(inner), shortcut)


def _make_group(inputs: int, outputs: int, stride: int, blocks: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    """A residual network: `forward(x) = head(features(x))`; `features` returns `[N, feature_size]`."""

    def __init__(self, blocks: tuple[int, ...], classes: int, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        self.feature_size = 8 * width
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        groups = zip(widths, widths[1:], (1, 2, 2, 2), blocks, strict=False)
        self.groups = nn.Sequential(*(_make_group(*group) for group in groups))
        self.head = nn.Linear(self.feature_size, classes)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of images, `[N, feature_size]`."""
        conv, norm, _ = self.stem
        maps: torch.Tensor = self.groups(norm_relu(norm, conv(x)))
        return maps.mean(dim=(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images, `[N, classes]`."""
        logits: torch.Tensor = self.head(self.features(x))
        return logits


def build_resnet(classes: int, depth: int = 10, width: int = 64, channels: int = 3) -> ResNet:
    """Return a residual network.

    Args:
        classes: The number of outputs.
        depth: 10, 12, 18, 20 or 34 layers.
        width: The channels of the first layer.
        channels: The channels of the images.

    Raises:
        ValueError: If there is no network of that depth.
    """
    if depth not in BLOCKS:
        raise ValueError(f"depth = {depth}: there is no such ResNet; use one of {', '.join(map(str, BLOCKS))}")
    return ResNet(BLOCKS[depth], classes, width, channels)
