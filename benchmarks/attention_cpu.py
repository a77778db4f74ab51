"""Attention on a CPU beside PyTorch's: forward and backward together, in turns; and memory against T.

python benchmarks/attention_cpu.py   writes benchmarks/results/attention_cpu.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import attention, machine
from forge.bench_attention import peak_bytes
from forge.ops.attention.reference import visible

OUT = Path(__file__).parent / "results/attention_cpu.json"
ROUNDS = 5
CAUSAL = [(4, 1024, 8, 8, 64), (1, 2048, 8, 8, 64), (1, 4096, 8, 8, 64), (1, 1024, 8, 8, 128), (1, 4096, 4, 4, 128),
          (1, 2048, 8, 2, 64)]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(mask: Tensor | None = None) -> Attend:
    return lambda q, k, v: F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


def compare(what: str, shape: tuple[int, ...], dtype: torch.dtype, ours: dict[str, Attend], peer: Attend) -> list[dict]:
    """Rows: the peer's time over ours, the median of the rounds and its ends."""
    B, T, H, K, D = shape
    q, k, v, dout = (torch.randn(B, T, heads, D).to(dtype).requires_grad_() for heads in (H, K, K, H))
    seconds: dict[str, list[float]] = {name: [] for name in ("peer", *ours)}
    for turn in range(ROUNDS + 1):
        for name, attend in {"peer": peer, **ours}.items():
            began = time.perf_counter()
            torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    rows = []
    for name in ours:
        ratios = sorted(p / o for p, o in zip(seconds["peer"], seconds[name]))
        rows.append({"what": what, "shape B,T,H,K,D": shape, "dtype": str(dtype)[6:], "ours": name,
                     "ms": 1000 * statistics.median(seconds[name]), "peer_ms": 1000 * statistics.median(seconds["peer"]),
                     "peer_over_ours": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]})
        print(f"{what} {shape} {str(dtype)[6:]} {name}: {rows[-1]['peer_over_ours']:.2f} "
              f"[{ratios[0]:.2f}-{ratios[-1]:.2f}] of the peer's speed, {rows[-1]['ms']:.0f} ms", flush=True)
    return rows


if __name__ == "__main__":
    torch.manual_seed(0)
    machine.settle_cpu()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in CAUSAL[:6 if dtype == torch.float32 else 2]:
            rows += compare("causal", shape, dtype, {
                "blocked": lambda q, k, v: attention(q, k, v, backend="blocked"), "chosen": attention}, sdpa())
    T = 16_384
    mask = visible(T, T, None, True, 256, torch.device("cpu"))
    rows += compare("window 256, the peer with a T x T mask", (1, T, 1, 1, 64), torch.float32,
                    {"blocked": lambda q, k, v: attention(q, k, v, window=256, backend="blocked")}, sdpa(mask))
    memory = []
    for T in (2048, 4096, 8192, 16_384, 32_768, 65_536):
        q, k, v = (torch.randn(1, T, 1, 64, requires_grad=True) for _ in range(3))
        peak = peak_bytes(lambda q=q, k=k, v=v: torch.autograd.grad(
            attention(q, k, v, backend="blocked").sum(), (q, k, v)), torch.device("cpu"))
        memory.append({"T": T, "peak_mib": (peak or 0) / 2 ** 20})
        print(f"memory: T={T}, one head of 64: {memory[-1]['peak_mib']:.1f} MiB above the inputs", flush=True)
    OUT.write_text(json.dumps({"measured": rows, "memory": memory,
                               "environment": machine.environment(torch.device("cpu"))}, indent=1) + "\n")
