"""Tokens a second that one text, and eight, are written with on this machine's CPU: Forge beside transformers, in turns.

    python benchmarks/decode.py [ROUNDS]        (needs: pip install transformers)

The gpt2-124m shape with the same random weights on both sides, 64 prompt tokens, 64 new ones, likeliest first; the whole
call is timed. Writes benchmarks/results/decode.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from forge.generate import ROWS, Sampling, complete
from forge.machine import environment, settle_cpu
from forge.model.transformer import Transformer
from forge.presets import preset
from forge.tokenizer import Tokenizer

NEW = 64


def same_weights(theirs: GPT2LMHeadModel, dtype: torch.dtype) -> Transformer:
    """Forge's model with the other's weights; there q, k and v are one matrix, and matrices are (in, out)."""
    model = Transformer(preset("gpt2-124m").model.resolve(), dtype).eval()
    t = theirs.transformer
    weights = {"embedding.weight": t.wte.weight, "position.weight": t.wpe.weight, "norm.weight": t.ln_f.weight,
               "norm.bias": t.ln_f.bias}
    for i, block in enumerate(t.h):
        parts = {"attention_norm": block.ln_1, "mlp_norm": block.ln_2, "attention.wo": block.attn.c_proj,
                 "mlp.up": block.mlp.c_fc, "mlp.down": block.mlp.c_proj}
        for name, module in parts.items():
            weights[f"blocks.{i}.{name}.weight"] = module.weight.T if module.weight.dim() == 2 else module.weight
            weights[f"blocks.{i}.{name}.bias"] = module.bias
        for name, w, b in zip(("wq", "wk", "wv"), block.attn.c_attn.weight.chunk(3, 1), block.attn.c_attn.bias.chunk(3)):
            weights[f"blocks.{i}.attention.{name}.weight"], weights[f"blocks.{i}.attention.{name}.bias"] = w.T, b
    model.load_state_dict(weights)
    return model


def main(rounds: int) -> None:
    settle_cpu()
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    tokenizer = Tokenizer.load("gpt2")
    ours = {name: same_weights(theirs, getattr(torch, name)) for name in ("float32", "bfloat16")}
    prompt = "The night was long and the fire low, and nobody spoke. " * 9
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(prompt)][:64]])
    prompt = tokenizer.decode(ids[0, 1:].tolist())
    written: dict[str, list[int]] = {}

    def transformers_s(n: int) -> float:
        began = time.perf_counter()
        out = theirs.generate(ids.expand(n, -1), attention_mask=torch.ones(n, ids.shape[1], dtype=torch.long),
                              max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=tokenizer.eot)
        written["transformers"] = out[0, ids.shape[1]:].tolist()
        return time.perf_counter() - began

    def forge_s(n: int, dtype: str) -> float:
        began = time.perf_counter()
        done = complete(ours[dtype], tokenizer, [prompt], n=n, max_new_tokens=NEW,
                        sampling=Sampling(temperature=0, logit_bias={tokenizer.eot: -float("inf")}))
        written[dtype] = done[0].ids
        return time.perf_counter() - began

    runs = {f"{who}, {n} texts": (lambda who=who, n=n: transformers_s(n) if who == "transformers" else forge_s(n, who))
            for n in (1, 8) for who in ("transformers", "float32", "bfloat16")}
    found: dict[str, list[float]] = {name: [] for name in runs}
    with ours["float32"].packed(ROWS), ours["bfloat16"].packed(ROWS):       # once for all texts, as a server would
        for run in runs.values():
            run()
        assert written["float32"] == written["transformers"], "not the same text"
        for _ in range(rounds):
            for name, run in runs.items():
                found[name].append(int(name.split()[1]) * NEW / run())
    print(f"{'new tokens a second':24} median     min     max   of transformers'")
    for name, speeds in found.items():
        base = statistics.median(found["transformers, " + name.split(", ")[1]])
        print(f"{name:24} {statistics.median(speeds):6.1f}  {min(speeds):6.1f}  {max(speeds):6.1f}   "
              f"{statistics.median(speeds) / base:.2f}")
    (Path(__file__).parent / "results" / "decode.json").write_text(json.dumps(
        {"new_tokens_per_s": found, "transformers": transformers.__version__,
         "environment": environment(torch.device("cpu"))}, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
