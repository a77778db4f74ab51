"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from forge.config import OptimConfig

TOGETHER = 1 << 26      # numbers in the matrices that go through Newton-Schulz at a time
COEFFICIENTS = (3.4445, -4.7750, 2.0315)    # of the Newton-Schulz quintic, as in torch.optim.Muon


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly, of each of (n, rows, columns), in their dtype.

    Source: Muon, kellerjordan.github.io/posts/muon. Equal to torch.optim.Muon's but for the dtype, which is bfloat16
    there; several matrices at a time.
    """
    a, b, c = COEFFICIENTS
    x = matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov) orthogonalized, for matrices; those of one shape go through Newton-Schulz together.

    Arguments and results are those of torch.optim.Muon; weight_decay is decoupled. dtype: of Newton-Schulz, which is
    bfloat16 there. compiled: Newton-Schulz, for a GPU.
    """

    found_inf: Tensor | None = None     # as in torch's fused AdamW: where it is 1, a step changes nothing

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float,
                 adjust_lr_fn: str, dtype: torch.dtype = torch.bfloat16, compiled: bool = False) -> None:
        self.dtype = dtype
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False) if compiled else orthogonalize
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum,
                                  "adjust_lr_fn": adjust_lr_fn})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append(p)
            for shape, params in shapes.items():
                for at in range(0, len(params), n := max(1, TOGETHER // shape.numel())):
                    self.step_together(params[at:at + n], group)

    def step_together(self, params: list[Tensor], group: dict[str, Any]) -> None:
        moments = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in params]
        grads = torch.stack([p.grad for p in params if p.grad is not None])
        old = torch.stack(moments)
        new = old.lerp(grads, 1 - group["momentum"])
        updates = self.orthogonalize(grads.lerp_(new, group["momentum"]).to(self.dtype)).to(grads.dtype)
        decay = 1 - group["lr"] * group["weight_decay"]
        if self.found_inf is not None:
            good = self.found_inf == 0
            new, updates = torch.where(good, new, old), torch.where(good, updates, 0.0)
            torch._foreach_mul_(params, torch.where(good, decay, 1.0))
        else:
            torch._foreach_mul_(params, decay)
        torch._foreach_copy_(moments, list(new))
        lr = group["lr"] * shape_factor(params[0].shape, group["adjust_lr_fn"])
        torch._foreach_add_(params, list(updates), alpha=-lr)


def shape_factor(shape: torch.Size, adjust_lr_fn: str) -> float:
    """What the rate is multiplied with for a matrix of this shape (torch.optim.Muon's adjust_lr_fn)."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))      # arXiv:2502.16982 eq. 4
    return math.sqrt(max(1, rows / columns))


def optimizers(model: nn.Module, config: OptimConfig, dtype: torch.dtype, compiled: bool = False
               ) -> list[torch.optim.Optimizer]:
    """The optimizers that OPTIMIZERS names, over all parameters; vectors (norms, biases) are not decayed.

    dtype: in which the machine multiplies fastest, for Muon's products, which may be compiled; weights and moments are
    float32.
    """
    return OPTIMIZERS[config.optimizer](model, config, dtype, compiled)


def adamw(model: nn.Module, config: OptimConfig, dtype: torch.dtype, compiled: bool, but: Iterable[nn.Parameter] = ()
          ) -> list[torch.optim.Optimizer]:
    taken = {id(p) for p in but}
    params = [p for p in model.parameters() if id(p) not in taken]
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    return [torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=(config.beta1, config.beta2),
                              fused=True)]


def muon(model: nn.Module, config: OptimConfig, dtype: torch.dtype, compiled: bool) -> list[torch.optim.Optimizer]:
    """The matrices inside the blocks by Muon; embeddings, head, gains and biases by AdamW."""
    hidden = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    return [Muon(hidden, config.muon_lr, config.weight_decay, config.momentum, config.adjust_lr_fn, dtype,
                 compiled), *adamw(model, config, dtype, compiled, but=hidden)]


OPTIMIZERS: dict[str, Callable[[nn.Module, OptimConfig, torch.dtype, bool], list[torch.optim.Optimizer]]] = {
    "adamw": adamw, "muon": muon}


def cosine(progress: float, config: OptimConfig) -> float:
    return config.min_lr + (1 - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float, config: OptimConfig) -> float:
    if progress <= 1 - config.cooldown:
        return 1.0
    return config.min_lr + (1 - config.min_lr) * (1 - progress) / config.cooldown


SCHEDULES: dict[str, Callable[[float, OptimConfig], float]] = {"cosine": cosine, "linear": linear}


def lr_factor(step: int, progress: float, config: OptimConfig) -> float:
    """What the peak rates are multiplied with at a step (from 0) when this part of the budget is spent."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    return warm * SCHEDULES[config.schedule](min(max(progress, 0.0), 1.0), config)


HOST_MASKS = {"mps"}        # devices whose fused AdamW takes no note of found_inf (pytorch#186360)


def step(optimizers: list[torch.optim.Optimizer], bad: Tensor) -> None:
    """One step, which changes no weight and no moment where `bad` (a scalar on their device, 0.0 or 1.0) is 1: decided
    there, so that the host need not wait for it, but on a device in HOST_MASKS."""
    if bad.device.type in HOST_MASKS and bool(bad):
        return
    for optimizer in optimizers:
        optimizer.found_inf = bad       # type: ignore[attr-defined]
        optimizer.step()


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor


def state_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every moment by the name of its parameter: 'blocks.0.attention.wq.weight/momentum_buffer'."""
    tensors = {}
    for optimizer in optimizers:
        for name, p in model.named_parameters():
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"{name}/{key}"] = value
    return tensors


def load_state_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Puts back what state_tensors gave. Raises KeyError when a parameter's moments are missing."""
    keys = {"Muon": ("momentum_buffer",), "AdamW": ("step", "exp_avg", "exp_avg_sq")}
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p] = {key: tensors[f"{names[id(p)]}/{key}"].to(p.device, torch.float32, copy=True)
                                      for key in keys[type(optimizer).__name__]}
