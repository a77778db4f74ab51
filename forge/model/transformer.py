"""The decoder: one file, switched by ModelConfig. It knows nothing of files, devices or parallelism.

Weights are float32 masters; every matrix is used in the dtype of the activations, which `Transformer.dtype` sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge.config import ModelConfig
from forge.ops import float8
from forge.ops.activated_linear import activated_linear, activation
from forge.ops.attention import attention, packed
from forge.ops.cross_entropy import linear_cross_entropy


class Cache:
    """Keys and values of the tokens of one sequence so far, for decoding: (capacity, K, D) a layer."""

    def __init__(self, config: ModelConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.n_layers, 1, capacity, config.n_kv_heads, config.head_dim)
        self.k, self.v = torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
        self.rope = rope_tables(capacity, config.head_dim, config.rope_base, device, dtype)
        self.capacity, self.length = capacity, 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values (T, K, D) of a layer and returns all (1, length + T, K, D)."""
        end = self.length + k.shape[0]
        self.k[layer, 0, self.length:end], self.v[layer, 0, self.length:end] = k, v
        return self.k[layer, :, :end], self.v[layer, :, :end]


class Linear(nn.Linear):
    packed: Tensor | None = None        # the weight as decoding reads it, set by `packed` below
    fp8 = False                         # while training

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return product(x, self.packed, self.bias)
        return linear(x, self.weight, self.bias, self.fp8 and self.training)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, fp8: bool) -> Tensor:
    if not fp8:
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    y = float8.linear(x, weight)
    return y if bias is None else y + bias.to(x.dtype)


def joined(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """What several layers make of x, side by side, by one product: larger, so faster. Their weights and gradients stay
    apart."""
    first, weight = linears[0], torch.cat([each.weight for each in linears])
    bias = None if first.bias is None else torch.cat([each.bias for each in linears])
    return linear(x, weight, bias, first.fp8 and first.training)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear with a weight that `pack` made."""
    bias = None if bias is None else bias.to(x.dtype)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def pack(weight: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The weight in the dtype of the computation; on a CPU in oneDNN's own order for products of few rows.

    There a row of 2 to `rows` comes out the same to the bit, and bfloat16 runs at the speed of memory; with the plain
    order neither holds. A processor without AVX-512 has no such product in bfloat16.
    """
    weight = weight.detach().to(dtype)
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and (dtype == torch.float32 or (
            dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())):
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return weight


class Norm(nn.Module):
    """RMSNorm (arXiv:1910.07467) or LayerNorm over the last dimension, computed in float32 or wider."""

    def __init__(self, dim: int, kind: str = "rms") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.bias is not None:
            y = F.layer_norm(y, y.shape[-1:], self.weight.to(y.dtype), self.bias.to(y.dtype), eps=1e-5)
        else:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * self.weight.to(y.dtype)
        return y.to(x.dtype)


def rope_tables(T: int, head_dim: int, base: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, D/2) of positions 0 .. T. Source: RoFormer, arXiv:2104.09864 eq. 34."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=wide) / head_dim)
    angles = torch.arange(T, device=device, dtype=wide)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channel i of x (B, T, H, D) with channel i + D/2 by its position's angle."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    packed_qkv: tuple[Tensor, Tensor | None] | None = None      # wq, wk and wv as decoding reads them: one product

    def __init__(self, config: ModelConfig, layer: int, backend: str | None) -> None:
        super().__init__()
        self.config, self.layer, self.window, self.backend = config, layer, config.layer_window(layer), backend
        H, K, D = config.n_heads, config.n_kv_heads, config.head_dim
        self.wq = Linear(config.dim, H * D, config.bias)
        self.wk = Linear(config.dim, K * D, config.bias)
        self.wv = Linear(config.dim, K * D, config.bias)
        self.wo = Linear(H * D, config.dim, config.bias)
        self.q_norm: Norm | nn.Identity = Norm(D) if config.qk_norm else nn.Identity()
        self.k_norm: Norm | nn.Identity = Norm(D) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, starts: Tensor | None, rope: tuple[Tensor, Tensor] | None,
                caches: Sequence[Cache] | None) -> Tensor:
        B, T, _ = x.shape
        c = self.config
        qkv = joined(x, (self.wq, self.wk, self.wv)) if self.packed_qkv is None else product(x, *self.packed_qkv)
        backend = self.backend if caches is None else None
        if backend == "sdpa" and starts is not None:
            backend = "blocked"         # in evaluations between steps, where sdpa was taken for a text of one document
        if caches is None and backend and backend.startswith("triton") and packed.supports(qkv, c.head_dim):
            q_gain, k_gain = (norm.weight if isinstance(norm, Norm) else None for norm in (self.q_norm, self.k_norm))
            cos, sin = rope or (None, None)
            packed_out = packed.attend(qkv, q_gain, k_gain, cos, sin, starts, c.n_heads, c.n_kv_heads, self.window, backend)
            return self.wo(packed_out.flatten(2))
        q, k, v = packed.parts(qkv, c.n_heads, c.n_kv_heads, c.head_dim)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if caches is None:
            out = attention(q, k, v, window=self.window, starts=starts, backend=backend)
            assert isinstance(out, Tensor)      # and no pair with lse
        else:               # row by row: each sequence has a length of its own
            out = torch.zeros_like(q)
            for row, cache in enumerate(caches):
                seen = cache.append(self.layer, k[row], v[row])
                out[row] = attention(q[row:row + 1], *seen, window=self.window)[0]
        return self.wo(out.reshape(B, T, c.n_heads * c.head_dim))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        self.up = Linear(config.dim, config.ffn_dim, config.bias)
        if config.mlp == "swiglu":
            self.gate = Linear(config.dim, config.ffn_dim, config.bias)
        self.down = Linear(config.ffn_dim, config.dim, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.down.packed is not None:
            swiglu = self.kind == "swiglu"
            return self.down(F.silu(self.gate(x)) * self.up(x) if swiglu else activation(self.up(x), self.kind))
        h = joined(x, (self.gate, self.up)) if self.kind == "swiglu" else self.up(x)
        if self.down.fp8 and self.training:
            return self.down(activation(h, self.kind))
        y = activated_linear(h, self.down.weight.to(x.dtype), self.kind)
        return y if self.down.bias is None else y + self.down.bias.to(x.dtype)


class Block(nn.Module):
    recompute = "none"

    def __init__(self, config: ModelConfig, layer: int, backend: str | None) -> None:
        super().__init__()
        self.attention_norm = Norm(config.dim, config.norm)
        self.attention = Attention(config, layer, backend)
        self.mlp_norm = Norm(config.dim, config.norm)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, y: Tensor, starts: Tensor | None, rope: tuple[Tensor, Tensor] | None,
                caches: Sequence[Cache] | None) -> tuple[Tensor, Tensor]:
        """x: the residual stream, y: what the block before adds to it; so too the result. Blocks are compiled one by one,
        and a sum is nearly free within the kernel of the norm that follows it."""
        x = x + y
        x = x + self.dropout(self.attention(self.attention_norm(x), starts, rope, caches))
        if self.recompute == "selective" and self.training:
            return x, self.dropout(checkpoint(self.feed, x, use_reentrant=False, preserve_rng_state=False))
        return x, self.dropout(self.feed(x))

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A causal language model; config must be resolved, vocab_size included.

    dtype: of the computation. backend: of attention but in decoding; None lets each call choose.
    recompute: what training computes again in the backward rather than keep (activation checkpointing, arXiv:1604.06174):
    none, selective (each block's MLP), full (each block). fp8: whether training multiplies in 8 bits within the blocks
    (ops.float8).
    """

    packed_head: Tensor | None = None

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, backend: str | None = None,
                 recompute: str = "none", fp8: bool = False) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.seq_len, config.dim) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config, layer, backend) for layer in range(config.n_layers))
        for module in self.blocks.modules():
            if isinstance(module, Linear):
                module.fp8 = fp8
        self.norm = Norm(config.dim, config.norm)
        self.head = None if config.tied else Linear(config.dim, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.set_recompute(recompute)

    def set_recompute(self, kind: str) -> None:
        self.recompute = kind
        for block in self.blocks:
            block.recompute = kind      # type: ignore[assignment]

    def forward(self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor:
        """Mean nats per token, a scalar; in training also the z-loss.

        inputs, targets (B, T) int64, a negative target is not counted; starts (B, T) int32 as in ops.attention.
        """
        return self.mean_nats(*self.stream(inputs, starts), targets)

    def mean_nats(self, x: Tensor, y: Tensor, targets: Tensor) -> Tensor:
        c = self.config
        return linear_cross_entropy(self.norm(x + y).flatten(0, 1), self.head_weight, targets.flatten(), softcap=c.softcap,
                                    z_loss=c.z_loss if self.training else 0.0)

    def compile_parts(self) -> None:
        """torch.compile block by block, which share one graph, so the wait does not grow with the depth; and the loss."""
        for block in self.blocks:
            block.compile(dynamic=False)
        self.mean_nats = torch.compile(self.mean_nats, dynamic=False)       # type: ignore[method-assign]

    def hidden(self, inputs: Tensor, starts: Tensor | None = None, caches: Sequence[Cache] | None = None) -> Tensor:
        """(B, T, C) for the tokens (B, T), row b after those in caches[b], which takes them in; rows without a cache are
        padding. Raises ValueError past the last learned position or a cache's end.
        """
        x, y = self.stream(inputs, starts, caches)
        return self.norm(x + y)

    def stream(self, inputs: Tensor, starts: Tensor | None, caches: Sequence[Cache] | None = None) -> tuple[Tensor, Tensor]:
        """`hidden` before its norm: the residual stream and what the last block adds to it."""
        c, (B, T) = self.config, inputs.shape
        firsts = [0] * B if caches is None else [cache.length for cache in caches] + [0] * (B - len(caches))
        if caches and max(firsts) + T > caches[0].capacity:
            raise ValueError(f"{max(firsts) + T} tokens do not fit into a cache of {caches[0].capacity}")
        x = self.embedding(inputs)
        rope = None
        if self.position is not None:
            if max(firsts) + T > c.seq_len:
                raise ValueError(f"{max(firsts) + T} tokens: the model has learned {c.seq_len} positions")
            if caches is None:
                x = x + self.position.weight[:T]
            else:
                positions = torch.arange(T, device=inputs.device)
                x = x + self.position(torch.stack([positions + first for first in firsts]))
        elif caches is None:
            rope = rope_tables(T, c.head_dim, c.rope_base, inputs.device, self.dtype)
        else:
            cos, sin = (torch.stack([table[first:first + T] for first in firsts]) for table in caches[0].rope)
            rope = cos, sin
        x = self.dropout(x.to(self.dtype))
        y = torch.zeros_like(x)
        for block in self.blocks:
            if self.recompute == "full" and self.training:
                x, y = checkpoint(block, x, y, starts, rope, caches, use_reentrant=False, preserve_rng_state=c.dropout > 0)
            else:
                x, y = block(x, y, starts, rope, caches)
        for cache in caches or ():
            cache.length += T
        return x, y

    def logits(self, x: Tensor) -> Tensor:
        """(..., V) in float32 or wider, from (..., C)."""
        weight = self.head_weight.to(x.dtype) if self.packed_head is None else self.packed_head
        logits = product(x, weight, None)
        logits = logits.to(torch.promote_types(x.dtype, torch.float32))
        softcap = self.config.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    @contextmanager
    def packed(self, rows: int) -> Iterator[None]:
        """While it holds, products read weights that `pack` made for up to so many rows; the weights must not change. Within
        another it does nothing: hold one around many calls of `write`, since packing copies every weight."""
        if self.packed_head is not None:
            yield
            return
        attentions = [module for module in self.modules() if isinstance(module, Attention)]
        apart = {self.head, *(linear for a in attentions for linear in (a.wq, a.wk, a.wv))}
        linears = [module for module in self.modules() if isinstance(module, Linear) and module not in apart]
        try:
            for a in attentions:
                three = (a.wq, a.wk, a.wv)
                bias = torch.cat([linear.bias.detach() for linear in three]).to(self.dtype) if self.config.bias else None
                a.packed_qkv = pack(torch.cat([linear.weight.detach() for linear in three]), self.dtype, rows), bias
            for module in linears:
                module.packed = pack(module.weight, self.dtype, rows)
            self.packed_head = pack(self.head_weight, self.dtype, rows)
            yield
        finally:
            self.packed_head = None
            for a in attentions:
                a.packed_qkv = None
            for module in linears:
                module.packed = None

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Embeddings and head normal(0, 0.02); matrices normal(0, 1/sqrt(fan in)); gains 1, biases 0.

    The two matrices of a block that write into the residual stream are divided by sqrt(2 n_layers), as in GPT-2.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = 1 / math.sqrt(parameter.shape[1])
        if name.endswith(("wo.weight", "down.weight")):
            std /= math.sqrt(2 * model.config.n_layers)
        if name in ("embedding.weight", "position.weight", "head.weight"):
            std = 0.02
        # drawn on the CPU: one seed gives the same weights on every device
        parameter.copy_(torch.empty(parameter.shape).normal_(0, std, generator=generator))
