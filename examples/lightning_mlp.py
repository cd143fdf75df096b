"""A LightningModule made sparse by a callback; lines with an arrow are all that smupar adds.

Run: python examples/lightning_mlp.py
"""

from functools import partial

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smupar  # <- 1
from smupar.integrations.lightning import SmuparCallback  # <- 2


class MLP(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.layers(inputs), targets)
        if number % 20 == 0:
            print(f"batch {number:3d}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2**-8, weight_decay=0.1)


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2560, 16)
    data = DataLoader(TensorDataset(inputs, inputs.unflatten(1, (4, 4)).square().sum(2).argmax(1)), batch_size=32, shuffle=True)
    rigl = partial(smupar.RigL, every=10, stop=60)  # <- 3, for masks that move
    sparse = SmuparCallback(base=lambda: MLP(64), density=1 / 4, sparsifier=rigl)  # <- 4
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=[sparse],  # <- 5
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = MLP(256)
    trainer.fit(model, data)
    weight = model.layers[2].weight
    print(f"kept weights after training: {torch.count_nonzero(weight) / weight.numel():.4f}")


if __name__ == "__main__":
    main()
