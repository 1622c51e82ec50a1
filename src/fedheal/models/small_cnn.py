"""A small convolutional network that trains in seconds on one processor core.

Three 3 x 3 convolutions with batch normalisation, max-pooling and ReLU, with 1, 2 and 4 times `width` channels. The
last feature map is 4 x 4 for 32 x 32 images, the smallest that fit. For larger images it is averaged down to 4 x 4.
Images are laid out channels-last inside, which nearly doubles the speed of the convolutions on a CPU.
"""

import torch
from torch import nn
from torch.nn import functional

GRID = 4  # side of the last feature map


def _make_stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.MaxPool2d(2),  # before ReLU, which then has a quarter of the work; the result is the same, bit for bit
        nn.ReLU(),
    )


class SmallCNN(nn.Module):
    """The small network: `forward(x) = head(features(x))`. Its cost grows with the square of the width."""

    def __init__(self, classes: int, width: int = 8, channels: int = 3) -> None:
        super().__init__()
        self.feature_size = 4 * width * GRID * GRID
        self.body = nn.Sequential(
            _make_stage(channels, width), _make_stage(width, 2 * width), _make_stage(2 * width, 4 * width)
        )
        self.head = nn.Linear(self.feature_size, classes)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of images, `[N, feature_size]`."""
        if min(x.shape[-2:]) < 8 * GRID:
            raise ValueError(
                f"small_cnn needs images of at least 32 x 32 pixels, got {x.shape[-2]} x {x.shape[-1]}: "
                "set image_size=32 for images on disk, resize those of your own function or Domains, or use another model"
            )
        maps: torch.Tensor = self.body(x.contiguous(memory_format=torch.channels_last))
        if maps.shape[-2:] != (GRID, GRID):  # its gradient has no deterministic kernel on GPUs
            maps = functional.adaptive_avg_pool2d(maps, GRID)
        return maps.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images, `[N, classes]`."""
        logits: torch.Tensor = self.head(self.features(x))
        return logits
