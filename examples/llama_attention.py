"""Forge's attention in a model that Forge did not write: a small Llama of transformers, which it then trains.

    pip install transformers
    python examples/llama_attention.py [STEPS]
"""

import sys
from typing import Any

import torch

import forge

try:
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError:
    sys.exit("this example needs transformers; type: pip install transformers")


def forge_attention(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any,
                    scaling: float | None = None, sliding_window: int | None = None, backend: str | None = None,
                    **_: Any) -> tuple[torch.Tensor, None]:
    """transformers gives (B, heads, T, D) and wants (B, T, heads, D); grouped heads and windows are Forge's own."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return forge.attention(q, k, v, scale=scaling, window=sliding_window, backend=backend), None


def no_mask(*_: Any, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **__: Any) -> None:
    """Causality is built in, so no T x T mask is made; one for padding cannot be had."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("attention_mask hides padding, which this attention does not; cut the texts to one length")
    if not allow_is_causal_skip:        # position_ids that begin anew, or a cache of fixed size
        raise ValueError("more than causality is to be masked, which this attention does not; leave position_ids out")


AttentionInterface.register("forge", forge_attention)
AttentionMaskInterface.register("forge", no_mask)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
                     num_key_value_heads=2, max_position_embeddings=256)
config._attn_implementation = "forge"
model = LlamaForCausalLM(config)

text = torch.tensor(list(b"the forge is hot and the iron is red, so we strike while it glows. " * 40))
batch = text.unfold(0, 128, 64)[:16]                            # (16, 128) bytes
with torch.no_grad():
    ours = model(batch, backend="blocked").logits               # named, for on a CPU Forge may itself take PyTorch's
    model.set_attn_implementation("sdpa")
    theirs = model(batch).logits
    model.set_attn_implementation("forge")
print(f"logits differ from those of PyTorch's attention by at most {(ours - theirs).abs().max():.1e}")
assert torch.allclose(ours, theirs, atol=1e-4)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 60):
    loss = model(batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step}: {loss.item():.3f} nats a byte")
print(f"at the end: {loss.item():.3f} nats a byte")
