"""A residual network of convolutions, made sparse in your own loop; lines with an arrow are all that smupar adds.

Run: python examples/resnet.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import smupar  # <- 1

CLASSES = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


class ResNet(nn.Module):
    """Two stages. The second has half the resolution and twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.first, self.second = Block(width), Block(2 * width)
        self.down = nn.Conv2d(width, 2 * width, 1, stride=2)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.second(self.down(self.first(self.stem(images))))).mean((2, 3)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes in one of four directions, in noise."""
    rng = torch.Generator().manual_seed(step)
    targets = torch.randint(CLASSES, (32,), generator=rng)
    x, y = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    waves = torch.stack([torch.sin(1.6 * wave) for wave in (x, y, x + y, x - y)])
    return waves[targets][:, None] + torch.randn(32, 3, 8, 8, generator=rng), targets


def main() -> None:
    model = ResNet(64)
    plan = smupar.parameterize(model, base=ResNet(16), density=1 / 4)  # <- 2
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=2**-8, weight_decay=0.1))  # <- 3
    smupar.audit(model, plan, optimizer)  # <- 4
    for step in range(40):
        images, targets = batch(step)
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == 39:
            print(f"step {step:2d}  loss {loss.item():.3f}")
    kept = torch.count_nonzero(model.second.conv1.weight) / model.second.conv1.weight.numel()
    print(f"kept weights after training: {kept:.4f}")


if __name__ == "__main__":
    main()
