"""Forge's attention in a model of one's own: a window, packed documents, gradients, memory that grows with T.

    python examples/own_model.py [STEPS]
"""

import sys

import torch
from torch import nn

import forge


class Layer(nn.Module):
    """One layer of attention: 4 query heads share 2 key-value heads, and each token sees the last 16."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 4 * 16 + 2 * 2 * 16), nn.Linear(4 * 16, dim)

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 8, 16).split([4, 2, 2], dim=2)        # (B, T, heads, 16)
        return x + self.out(forge.attention(q, k, v, window=16, starts=starts).reshape(B, T, 64))


torch.manual_seed(0)
embedding, layers, head = nn.Embedding(32, 64), nn.ModuleList([Layer(), Layer()]), nn.Linear(64, 32)
modules = nn.ModuleList([embedding, layers, head])
optimizer = torch.optim.AdamW(modules.parameters(), lr=3e-3)

# two documents in each row: the second half repeats what its own first tokens were, and may not look across
tokens = torch.randint(32, (8, 8)).repeat(1, 8)                                             # (B, T) = (8, 64)
starts = torch.cat([torch.zeros(8, 32), torch.full((8, 32), 32)], dim=1).to(torch.int32)    # (B, T)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 200):
    x = embedding(tokens[:, :-1])
    for layer in layers:
        x = layer(x, starts[:, :-1])
    loss = nn.functional.cross_entropy(head(x).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step}: {loss.item():.3f} nats")
print(f"at the end: {loss.item():.3f} nats; without looking back it would be {torch.log(torch.tensor(32.0)):.3f}")
