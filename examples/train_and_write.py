"""Trains a model on a text and lets it write.

    python examples/train_and_write.py my-novel.txt runs/novel [STEPS]
"""

import sys
from dataclasses import replace

import forge

text, run, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 300

config = forge.preset("shakespeare")        # every setting is a field: forge/config.py says what each does
config = replace(config, data=replace(config.data, text=(text,)), train=replace(config.train, steps=steps))
forge.train(config, run=run)

print(forge.sample(run, "It was", max_new_tokens=100, temperature=0.8, min_p=0.05, seed=1))
