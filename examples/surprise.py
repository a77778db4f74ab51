"""Which words of a text surprise a model most: the logits as a torch tensor, and what may be done with them.

    python examples/surprise.py runs/novel "It was the best of times, it was the worst of times."
"""

import sys

import torch

import forge

model, tokenizer = forge.load_model(sys.argv[1], dtype=torch.float32)
ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(sys.argv[2])]])[:, :model.config.seq_len]      # (1, T)

with torch.no_grad():
    logits = model.logits(model.hidden(ids[:, :-1]))                                                # (1, T - 1, V)
bits = -torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[0, :, 0] / torch.log(torch.tensor(2.0))

for token, b in sorted(zip(ids[0, 1:].tolist(), bits.tolist()), key=lambda pair: -pair[1])[:10]:
    print(f"{b:6.2f} bits  {tokenizer.decode([token])!r}")
print(f"{bits.sum() / len(tokenizer.decode(ids[0, 1:].tolist()).encode()):.3f} bits per byte in all")
