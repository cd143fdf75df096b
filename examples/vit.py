"""A vision transformer with its own attention, made sparse; lines with an arrow are all that smupar adds.

Run: python examples/vit.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import smupar  # <- 1

CLASSES, HEAD_DIM = 4, 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = HEAD_DIM**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes in one of four directions, in noise."""
    rng = torch.Generator().manual_seed(step)
    targets = torch.randint(CLASSES, (32,), generator=rng)
    x, y = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.stack([torch.sin(1.6 * wave) for wave in (x, y, x + y, x - y)])
    return waves[targets][:, None] + torch.randn(32, 3, 16, 16, generator=rng), targets


def main() -> None:
    torch.manual_seed(0)
    model = ViT(128)
    plan = smupar.parameterize(model, base=ViT(64), density=1 / 4)  # <- 2
    for block in model.blocks:
        block.scale = plan.attention_scale(HEAD_DIM)  # <- 3, with the lines around it
    plan.settle("attention_scale")
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=2**-9, weight_decay=0.1))  # <- 4
    smupar.audit(model, plan, optimizer)  # <- 5
    for step in range(60):
        images, targets = batch(step)
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 15 == 0 or step == 59:
            print(f"step {step:2d}  loss {loss.item():.3f}")
    kept = torch.count_nonzero(model.blocks[0].up.weight) / model.blocks[0].up.weight.numel()
    print(f"kept weights after training: {kept:.4f}")


if __name__ == "__main__":
    main()
