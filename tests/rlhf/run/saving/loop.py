"""A training of a few numbers, to save and to load."""

from pathlib import Path

import torch
from accelerate import Accelerator


class Loop:
    """A linear model under Adam on random data: any lost state changes the numbers."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, count: int) -> list[float]:
        """Train that many steps: the loss of each."""
        losses = []
        for _ in range(count):
            loss = (self.model(torch.randn(4, 3)) - 1).pow(2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def names(folder: Path) -> list[str]:
    """What a folder holds."""
    return sorted(path.name for path in folder.iterdir())
