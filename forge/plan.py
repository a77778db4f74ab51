"""What a training step will need of a device's memory, and the micro-batch and recomputation that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from forge import machine
from forge.config import Config, ModelConfig, RequestError
from forge.ops.cross_entropy import CHUNK_LOGITS, GPU_CHUNK_LOGITS
from forge.optim import TOGETHER

USABLE = {"cuda": 0.92, "mps": 0.9}     # of the free memory; elsewhere it is shared with all that runs
USABLE_ELSEWHERE = 0.6
MICRO_BATCH_TOKENS = {"mps": 16_384, "cuda": 131_072}    # in one forward; more gains nothing
THREAD_TOKENS = 1024    # on a CPU, for each thread: 16,384 on two, which leave its caches, took a quarter more time
LOST_TOKENS = 1024      # a forward of n tokens takes the time of n and of so many more
EAGER = 2.0             # activations kept without the compiler, which recomputes norms and casts in the backward


def memory(c: Config) -> dict[str, float]:
    """{what: bytes} at the fullest moment of a step of a resolved config."""
    m, t = c.model, c.train
    item = torch.finfo(getattr(torch, t.dtype)).bits // 8
    tokens = t.micro_batch * m.seq_len
    hidden = m.matrix_parameters - m.vocab_size * m.dim
    by_adamw = m.parameters - (hidden if c.optim.optimizer == "muon" else 0)
    whole, mlp = kept_by_block(m, t.device == "cuda")
    layers = {"none": m.n_layers * whole, "selective": m.n_layers * (whole - mlp) + mlp,
              "full": m.n_layers * 2 * m.dim + whole}.get(t.recompute, m.n_layers * whole)
    chunk = min(tokens * m.vocab_size, GPU_CHUNK_LOGITS if t.device == "cuda" else CHUNK_LOGITS)
    return {"weights": 4 * m.parameters, "gradients": 4 * m.parameters,
            "moments": 4 * (m.parameters + by_adamw),
            f"weights in {'fp8' if t.fp8 else t.dtype}": (1 if t.fp8 else item) * hidden if item < 4 else 0,
            "activations": tokens * layers * item * (1 if t.compile else EAGER),
            "embeddings, head and loss": tokens * m.dim * (8 + 4 * item) + 2 * 4 * m.vocab_size * m.dim + chunk * item,
            "Muon": 16 * min(hidden, TOGETHER) if c.optim.optimizer == "muon" else 0}


def kept_by_block(m: ModelConfig, fused: bool) -> tuple[int, int]:
    """Numbers a token that a block keeps for its backward, and those of them that its MLP keeps. fused: the MLP keeps its
    activation's input alone (ops.activated_linear)."""
    heads = (m.n_heads + 2 * m.n_kv_heads) * m.head_dim
    attention = 2 * m.dim + heads * (2 if m.qk_norm else 1) + m.n_heads * m.head_dim       # input, its norm, q k v, output
    mlp = m.dim + m.ffn_dim * ((2 if m.mlp == "swiglu" else 1) + (not fused))
    return attention + m.dim + mlp, mlp


def cost(c: Config) -> float:
    """Time a token, in forwards and backwards of an endless batch that keeps everything."""
    m, t = c.model, c.train
    mlp = 2 * m.n_layers * m.dim * m.ffn_dim * (2 if m.mlp == "swiglu" else 1) / (m.flops_per_token() / 3)
    again = {"none": 0.0, "selective": mlp / 3, "full": 1 / 3}[t.recompute]
    return (1 + again) * (1 + LOST_TOKENS / (t.micro_batch * m.seq_len))


def settings(c: Config) -> Iterator[Config]:
    """c with each micro-batch and recomputation that it leaves open, the fastest first."""
    m, t = c.model, c.train
    most = MICRO_BATCH_TOKENS.get(t.device, min(THREAD_TOKENS * max(2, t.threads), 16_384))
    sequences = t.batch_tokens // m.seq_len
    sizes = [t.micro_batch] if t.micro_batch else [
        n for n in range(1, max(1, most // m.seq_len) + 1) if sequences % n == 0]
    kinds = ["none", "selective", "full"] if t.recompute == "auto" else [t.recompute]
    yield from sorted((replace(c, train=replace(t, micro_batch=n, recompute=kind))      # type: ignore[arg-type]
                       for n in sizes for kind in kinds), key=cost)


def fit(c: Config, device: torch.device) -> tuple[Config, str]:
    """The fastest setting that fits into what is free of the device's memory, and why. Raises RequestError for none."""
    there = machine.free_bytes(device) * USABLE.get(device.type, USABLE_ELSEWHERE)
    best = None
    for setting in settings(c):
        need = sum(memory(setting).values())
        if need <= there:
            words = f"{need / 1e9:.3g} GB planned of {there / 1e9:.0f} GB free"
            if best is not None:
                words += f"; {said(best)} would need {sum(memory(best).values()) / 1e9:.0f}"
            return setting, words
        best = best or setting
    least = min(settings(c), key=lambda setting: sum(memory(setting).values()))
    parts = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in memory(least).items() if size)
    raise RequestError(f"a step of this model does not fit into the {there / 1e9:.0f} GB that {device.type} has free, not "
                       f"even with {said(least)}: {parts}; name a smaller --preset, or set a smaller --model.dim, "
                       "--model.n-layers or --model.seq-len")


def smaller(c: Config) -> Config | None:
    """The fastest setting that needs a good deal less for activations than c, of the same batch; None: there is none."""
    open_ = replace(c, train=replace(c.train, micro_batch=0, recompute="auto"))
    return next((s for s in settings(open_) if memory(s)["activations"] < 0.8 * memory(c)["activations"]), None)


def said(c: Config) -> str:
    what = {"none": "nothing recomputed", "selective": "the MLPs recomputed", "full": "every block recomputed"}
    n = c.train.micro_batch
    return f"{n} window{'s' * (n > 1)} at a time and {what[c.train.recompute]}"


def table(c: Config) -> str:
    """Where the memory of a step goes."""
    rows = {name: size for name, size in memory(c).items() if size}
    rows["in all"] = sum(rows.values())
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {size / 1e9:9.3f} GB" for name, size in rows.items())
