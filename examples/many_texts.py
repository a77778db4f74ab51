"""Several prompts side by side, three texts for each, with the probability that the model gave each text.

    python examples/many_texts.py runs/novel "It was" "She said"
"""

import sys

import forge

model, tokenizer = forge.load_model(sys.argv[1])
written = forge.complete(model, tokenizer, sys.argv[2:], n=3, max_new_tokens=40, stop=["\n\n"], logprobs=True,
                         sampling=forge.Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1))

for c in sorted(written, key=lambda c: -sum(c.logprobs) / max(1, len(c.ids))):     # the likeliest a token first
    print(f"{sum(c.logprobs):8.1f} nats, {len(c.ids)} tokens, ended by {c.finish}, seed {c.seed}: {c.prompt + c.text!r}")
