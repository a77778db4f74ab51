"""Keeps bad steps away from the weights: the judgement on the device, and what is said when a run cannot go on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge.data.loader import Batch
from forge.model.transformer import Transformer

HISTORY = 128           # accepted steps that a new one is compared with ...
LEAST = 32              # ... once there are so many; before, only what is no number is bad
SIGMAS = 6.0
LOSS_SPREAD = 0.01      # nats: a loss scatters at least so much, and a gradient norm ...
NORM_SPREAD = 0.05      # ... by such a part of itself: a text known by heart leaves hardly any scatter
PATIENCE = 3            # steps in a row that are bad by their gradient's norm alone: then it is the place and not the batch


class Guard:
    """Tells a bad step by its loss and its gradient norm: no number, or above the mean of the last accepted ones by more
    than SIGMAS standard deviations. A norm that stays high while the loss does not is borne after PATIENCE steps, until it
    has been low again: skipping would keep the weights where they are steep, and clipping bounds what it can do. Everything
    stays on the device; the host need not wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin()
        self.places = torch.arange(HISTORY, device=device)
        self.least_spread = torch.tensor([[LOSS_SPREAD, 0.0], [0.0, NORM_SPREAD]], device=device)

    def begin(self) -> None:
        self.accepted = torch.zeros(2, HISTORY, device=self.device)     # losses; gradient norms
        self.count = torch.zeros((), device=self.device)                # of accepted steps, exact up to 2^24
        self.steep = torch.zeros((), device=self.device)                # steps in a row with a norm that is too high

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1.0 for a bad step, otherwise 0.0: all of them scalars on the device. A good one joins the accepted ones."""
        now = torch.stack((loss, grad_norm)).float()[:, None]
        n = self.count.clamp(1, HISTORY)
        known = self.places < self.count
        mean = self.accepted.sum(1, keepdim=True) / n
        spread = (torch.where(known, self.accepted - mean, 0.0).square().sum(1, keepdim=True) / n).sqrt()
        least = self.least_spread[:, :1] + self.least_spread[:, 1:] * mean
        loss_above, norm_above = (now > mean + SIGMAS * torch.maximum(spread, least))[:, 0] & (self.count >= LEAST)
        bad = loss_above | (norm_above & (self.steep < PATIENCE)) | ~now.isfinite().all()
        self.steep = torch.where(norm_above, self.steep + 1, 0.0)
        here = (self.places == self.count % HISTORY) & ~bad
        self.accepted = torch.where(here, now, self.accepted)
        self.count = self.count + (~bad).float()
        return bad.float()

    def tensors(self) -> dict[str, Tensor]:
        return {"guard/accepted": self.accepted, "guard/count": self.count, "guard/steep": self.steep}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """What tensors() gave; a checkpoint without it leaves the guard as it is at the beginning of a run."""
        if "guard/steep" in tensors:
            self.accepted, self.count, self.steep = (tensors[f"guard/{name}"].to(self.device, copy=True)
                                                     for name in ("accepted", "count", "steep"))


@torch.no_grad()
def diagnosis(model: Transformer, batch: Batch) -> str:
    """Where a batch becomes no number, or how large it grows, block by block, beside the size of the weights."""
    rows: list[tuple[str, float, float]] = []

    def note(name: str, module: torch.nn.Module, x: Tensor) -> None:
        weights = max((float(p.abs().max()) for p in module.parameters()), default=0.0)
        rows.append((name, float(x.float().square().mean().sqrt()), weights))

    hooks = [block.register_forward_hook(lambda module, _, out, i=i: note(f"block {i}", module, out[0] + out[1]))
             for i, block in enumerate(model.blocks)]
    hooks.append(model.embedding.register_forward_hook(lambda module, _, out: note("embedding", module, out)))
    hooks.append(model.norm.register_forward_hook(lambda module, _, out: note("last norm", module, out)))
    was_training = model.training
    try:
        with torch.compiler.set_stance("force_eager"):
            loss = float(model.eval()(*batch))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    first = next((name for name, size, weight in rows if not math.isfinite(size + weight)), None)
    words = (f"the first part that gives no number is {first}" if first else
             f"every part gives numbers, and the loss of that batch is {loss:.4g}")
    width = max(len(name) for name, _, _ in rows)
    table = "\n".join(f"  {name:{width}}  {size:12.4g}  {weight:12.4g}" for name, size, weight in rows)
    return f"{words}\n  {'':{width}}  {'mean size':>12}  {'largest weight':>14}\n{table}"
