"""Named sizes. Every preset is a whole Config; what it leaves at its default is said in config.py.

GPT-2's shapes are those of the paper's table 2 (Radford et al. 2019) with the layer sizes of the released weights.
"""

from __future__ import annotations

from forge.config import Config, DataConfig, ModelConfig, OptimConfig, RequestError, TrainConfig, nearest


def gpt2(name: str, n_layers: int, dim: int, n_heads: int, lr: float) -> Config:
    model = ModelConfig(vocab_size=50_257, seq_len=1024, dim=dim, n_layers=n_layers, n_heads=n_heads, norm="layer",
                        mlp="gelu", position="learned", qk_norm=False, bias=True, tied=True)
    optim = OptimConfig(optimizer="adamw", lr=lr, min_lr=0.1, warmup_steps=700)
    return Config(preset=name, model=model, data=DataConfig(tokenizer="gpt2"), optim=optim,
                  train=TrainConfig(batch_tokens=524_288))


def modern(name: str, n_layers: int, dim: int, n_heads: int, n_kv_heads: int, ffn_dim: int, seq_len: int,
           lr: float, batch_tokens: int = 524_288, tied: bool = False) -> Config:
    model = ModelConfig(seq_len=seq_len, dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads,
                        ffn_dim=ffn_dim, rope_base=100_000.0, tied=tied)
    optim = OptimConfig(lr=lr, schedule="linear", warmup_steps=100)
    return Config(preset=name, model=model, optim=optim, train=TrainConfig(batch_tokens=batch_tokens))


PRESETS: dict[str, Config] = {c.preset: c for c in (
    # the best of what was tried in three minutes on two cores: docs/LOG.md has the table
    Config(preset="shakespeare",
           model=ModelConfig(seq_len=128, dim=128, n_layers=4, n_heads=2, ffn_dim=344),
           optim=OptimConfig(lr=0.012, muon_lr=0.02, schedule="linear", cooldown=0.9, min_lr=0.01),
           train=TrainConfig(batch_tokens=4096)),
    Config(preset="gpt-10m",
           model=ModelConfig(seq_len=256, dim=384, n_layers=6, n_heads=6, mlp="relu2"),
           optim=OptimConfig(lr=3e-3, muon_lr=0.02, schedule="linear"),
           train=TrainConfig(batch_tokens=16_384)),
    gpt2("gpt2-124m", 12, 768, 12, 6e-4),
    gpt2("gpt2-350m", 24, 1024, 16, 3e-4),
    gpt2("gpt2-774m", 36, 1280, 20, 2.5e-4),
    gpt2("gpt2-1558m", 48, 1600, 25, 2e-4),
    modern("30m", 10, 384, 6, 2, 1024, 1024, 3e-3, 131_072, tied=True),
    modern("124m", 12, 768, 6, 2, 2048, 1024, 2e-3),
    modern("350m", 24, 1024, 8, 2, 2816, 2048, 1.5e-3),
    modern("1b", 20, 2048, 16, 4, 5632, 2048, 1e-3, 1_048_576),
    modern("3b", 28, 3072, 24, 8, 8192, 4096, 6e-4, 2_097_152),
    modern("8b", 32, 4096, 32, 8, 14_336, 8192, 3e-4, 4_194_304),
)}


def preset(name: str) -> Config:
    """The preset of this name. Raises RequestError with its neighbour when there is none."""
    if name not in PRESETS:
        raise RequestError(f"--preset {name}: there is no such preset; {nearest(name, list(PRESETS))}")
    return PRESETS[name]
