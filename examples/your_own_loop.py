"""A transformer, a training loop and a checkpoint of your own; lines with an arrow are all that smupar adds.

Run: python examples/your_own_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import smupar  # <- 1

VOCAB, HEAD_DIM = 64, 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = HEAD_DIM**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, HEAD_DIM).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(128, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def build(width: int, density: float) -> tuple[LM, smupar.Plan]:
    model = LM(width)
    plan = smupar.parameterize(model, base=LM(64), density=density, init_std=0.08, alpha_input=8.0)  # <- 2
    for block in model.blocks:
        block.scale = plan.attention_scale(HEAD_DIM)  # <- 3, with the lines around it
    plan.settle("attention_scale")
    return model, plan


def batch(step: int) -> torch.Tensor:
    """Arithmetic progressions modulo the vocabulary: the next token follows from the two before."""
    rng = torch.Generator().manual_seed(step)
    start, stride = torch.randint(VOCAB, (2, 16, 1), generator=rng)
    return (start + stride * torch.arange(33)) % VOCAB


def main() -> None:
    model, plan = build(width=128, density=1 / 4)
    print(plan)
    steps = 150
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=2**-7, weight_decay=0.1))  # <- 4
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    smupar.audit(model, plan, optimizer)  # <- 5
    for step in range(steps):
        ids = batch(step)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}")

    # Masks travel with the state dict: a fresh model gets the same logits.
    fresh, _ = build(width=128, density=1 / 4)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids), model(ids))
    kept = torch.count_nonzero(model.blocks[0].up.weight) / model.blocks[0].up.weight.numel()
    print(f"kept weights after training: {kept:.4f}")


if __name__ == "__main__":
    main()
