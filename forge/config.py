"""The whole configuration: one tree of frozen dataclasses, merged in a fixed order and validated. Imports no torch.

Order: preset -> config file (TOML) -> the run's saved config.json when resuming -> flags on the command line.
A number that may be derived is 0 until it is resolved; None means that a limit is not set.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Switch = Annotated[bool, Field(strict=True)]      # a TOML's "yes" is no boolean
Open = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RequestError(ValueError):
    """A wrong request: bad input or bad arguments. The message says what was given, what is needed, what to type."""


class Failure(RuntimeError):
    """The request was right and could not be fulfilled: a damaged checkpoint, a loss that is no number."""


class Interrupted(Exception):
    """A signal (its number) ended the work after what there was had been saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of the decoder."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    vocab_size: Count = 0
    """rows of the embedding; 0: as many as the tokenizer has tokens"""
    seq_len: Positive = 256
    """tokens in one training window"""
    dim: Positive = 384
    """width of the residual stream"""
    n_layers: Positive = 6
    n_heads: Positive = 6
    """query heads"""
    n_kv_heads: Count = 0
    """key-value heads, a divisor of n_heads; 0: n_heads"""
    head_dim: Count = 0
    """width of one head; 0: dim / n_heads"""
    ffn_dim: Count = 0
    """hidden width of the MLP; 0: 4 dim, or 8/3 dim rounded up to 64 for swiglu"""
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["swiglu", "gelu", "relu2"] = "swiglu"
    position: Literal["rope", "learned"] = "rope"
    rope_base: Open = 10_000.0
    qk_norm: Switch = True
    """RMSNorm of queries and keys, one gain a channel (arXiv:2302.05442)"""
    window: Positive | None = None
    """keys that a windowed layer sees, the query's own included; None: every layer sees all"""
    full_every: Positive = 4
    """with a window: every n-th layer and the last see all keys, the others the window"""
    bias: Switch = False
    tied: Switch = False
    """the head is the embedding"""
    softcap: Open | None = None
    """logits become softcap * tanh(logits / softcap)"""
    z_loss: Rate = 0.0
    """weight of mean(logsumexp(logits)^2), added to the training loss (arXiv:2204.02311 §5)"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def resolve(self) -> ModelConfig:
        """Fills what is derived from other fields."""
        head_dim = self.head_dim
        if not head_dim:
            if self.dim % self.n_heads:
                raise RequestError(f"model.dim={self.dim} is no multiple of model.n_heads={self.n_heads}; "
                                   "set --model.n-heads to a divisor, or name --model.head-dim")
            head_dim = self.dim // self.n_heads
        ffn_dim = self.ffn_dim or (math.ceil(self.dim * 8 / 3 / 64) * 64 if self.mlp == "swiglu" else 4 * self.dim)
        return dataclasses.replace(self, n_kv_heads=self.n_kv_heads or self.n_heads, head_dim=head_dim, ffn_dim=ffn_dim)

    def layer_window(self, layer: int) -> int | None:
        """The window of this layer (None: full attention)."""
        full = (layer + 1) % self.full_every == 0 or layer == self.n_layers - 1
        return None if full else self.window

    @property
    def matrix_parameters(self) -> int:
        """Parameters that are multiplied with every token: all matrices and the head, not the embedding look-up."""
        attention = self.dim * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        mlp = self.dim * self.ffn_dim * (3 if self.mlp == "swiglu" else 2)
        return self.n_layers * (attention + mlp) + self.vocab_size * self.dim

    @property
    def parameters(self) -> int:
        """All parameters, a tied head counted once."""
        norm = self.dim * (2 if self.norm == "layer" else 1)
        layer = 2 * norm + (2 * self.head_dim if self.qk_norm else 0)
        if self.bias:
            layer += self.head_dim * (self.n_heads + 2 * self.n_kv_heads) + self.dim
            layer += self.ffn_dim * (2 if self.mlp == "swiglu" else 1) + self.dim
        embedding = 0 if self.tied else self.vocab_size * self.dim
        position = self.seq_len * self.dim if self.position == "learned" else 0
        return self.matrix_parameters + embedding + position + self.n_layers * layer + norm

    def flops_per_token(self, seq_len: int | None = None) -> float:
        """Training FLOPs a token: 6 x matrix parameters + 12 x heads x head_dim x mean visible keys, summed over layers.

        The forward is a third of it. Recomputation is not counted. Source: PaLM, arXiv:2204.02311 appendix B, with
        the keys that a causal mask (about T/2) and a window leave.
        """
        T = seq_len or self.seq_len
        keys = 0.0
        for layer in range(self.n_layers):
            W = min(self.layer_window(layer) or T, T)
            keys += (W * (W + 1) / 2 + (T - W) * W) / T
        return 6 * self.matrix_parameters + 12 * self.n_heads * self.head_dim * keys


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    text: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")] = ()
    """files and folders of text (.txt .md .jsonl, each also .gz .bz2), or one folder made by `forge data prepare`;
    none: the bundled Shakespeare"""
    valid: str | None = None
    """validation text; None: the last 10 % of the text by bytes, whole documents where there are 20 or more"""
    text_field: str = "text"
    """the field of a .jsonl record that holds the text"""
    skip_bad_lines: Switch = False
    """leave out and count .jsonl lines that hold no text, where the default is to refuse them"""
    tokenizer: str | None = None
    """chars, bytes, bpe, gpt2, or a file: a tokenizer.json, GPT-2's encoder.json, a .tiktoken; None: chars for the bundled
    corpus, bytes below 1 MB, else bpe"""
    bpe_vocab: Count = 0
    """tokens of a bpe trained here; 0: the power of two next to the square root of the text's bytes"""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    optimizer: Literal["muon", "adamw"] = "muon"
    """muon: hidden matrices by Muon, the rest by AdamW; adamw: all by AdamW"""
    lr: Rate = 3e-3
    """peak learning rate of AdamW"""
    muon_lr: Rate = 0.02
    """peak learning rate of Muon"""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """how Muon's rate follows a matrix's shape, as torch.optim.Muon names it"""
    weight_decay: Rate = 0.1
    """decoupled, on matrices and embeddings"""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's"""
    schedule: Literal["cosine", "linear"] = "cosine"
    """cosine from the peak, or constant and then a linear cool-down"""
    warmup_steps: Count = 20
    cooldown: Fraction = 0.6
    """linear: the last part of the budget, over which the rate falls"""
    min_lr: Fraction = 0.05
    """the rate at the end, as a part of the peak"""
    clip: Rate = 1.0
    """largest gradient norm; 0: no clipping"""


@dataclass(frozen=True)
class TrainConfig:
    """Budget, batch, what happens now and then, and what the machine is asked for."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    steps: Positive | None = None
    tokens: Positive | None = None
    minutes: Open | None = None
    """budget: the first of steps, tokens and minutes to end ends the run; none given: derived and printed"""
    batch_tokens: Positive = 16_384
    """tokens in one step, a multiple of seq_len"""
    micro_batch: Count = 0
    """sequences in one forward pass; 0: derived from the device"""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """activations computed again in the backward instead of kept: none; selective: those of the MLPs; full: of whole blocks;
    auto: as few as fit into the device's memory"""
    eval_every: Count | None = None
    """steps between evaluations; None: so that they take about a twentieth of the time; 0: only at the end"""
    sample_every: Count | None = None
    """steps between samples; None: with every fourth evaluation, and two at the end; 0: never"""
    save_every: Count | None = None
    """steps between checkpoints; None: with every evaluation; 0: only at the end"""
    keep: Positive = 2
    """newest checkpoints kept; the best is kept besides"""
    keep_every: Count = 0
    """steps: checkpoints at multiples of it are kept, too; 0: none"""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the computation; weights and moments are float32"""
    fp8: Switch = False
    """bfloat16, with the products of the blocks' layers in 8 bits while training: for models of 1b and more, on NVIDIA GPUs
    from Ada and Hopper on"""
    compile: Switch | None = None
    """torch.compile; None: where its compiler is found and the run gains by it"""
    deterministic: Switch = True
    """each sum in one order: the same run gives the same weights to the bit"""
    attention: str = "auto"
    """blocked, sdpa, triton, metal or reference; auto: the fastest of those that pass their check"""
    threads: Count = 0
    """CPU threads; 0: as torch finds them, or fewer where that is faster"""


@dataclass(frozen=True)
class Config:
    """Everything that two runs can differ in."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    preset: str = "shakespeare"
    """a named size; `forge --help` lists them"""
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 1
    init: str | None = None
    """a run whose best weights and tokenizer are taken over"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


T = TypeVar("T")


def nearest(word: str, known: list[str]) -> str:
    """", did you mean ...?", or the whole list when nothing is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def merge(config: T, values: dict[str, Any], origin: str, prefix: str = "") -> T:
    """config with the values of a nested mapping laid over it. Raises RequestError for a key that it does not have."""
    known = {f.name: getattr(config, f.name) for f in fields(config)}  # type: ignore[arg-type]
    changes = {}
    for key, value in values.items():
        if key not in known:
            raise RequestError(f"{origin}: unknown key {prefix}{key}; {nearest(key, list(known))}")
        if is_dataclass(known[key]):
            if not isinstance(value, dict):
                raise RequestError(f"{origin}: {prefix}{key} is a table of settings, not {value!r}")
            changes[key] = merge(known[key], value, origin, f"{prefix}{key}.")
        else:
            changes[key] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def parse_json(text: str | bytes) -> Any:
    """json.loads, which raises ValueError here for whatever is wrong with a text."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def load_toml(config: Config, path: str) -> Config:
    """config with a TOML file laid over it."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"--config {path} is not TOML: {error}") from error
    merged = merge(config, values, path)
    try:
        return validate(merged)
    except RequestError as error:
        raise RequestError(f"--config {path}: {error}") from error


def load_json(path: Path) -> Config:
    """A config.json as a run saved it."""
    try:
        values = parse_json(path.read_bytes())
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; a run folder holds config.json") from error
    except ValueError as error:
        raise Failure(f"{path} is damaged: {error}; it holds the run's settings: put a whole one back") from error
    if not isinstance(values, dict):
        raise Failure(f"{path} is damaged: it holds no settings")
    return validate(merge(Config(), values, str(path)))


def save_json(config: Config, path: Path) -> None:
    """Writes the config, at once or not at all."""
    write_json(asdict(config), path)


def write_json(values: dict[str, Any], path: Path) -> None:
    """Writes a JSON object, at once or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def validate(config: Config) -> Config:
    """The config, its types and ranges checked by pydantic and its combinations here. Raises RequestError."""
    try:
        # an instance would not be checked again, and strict mode would refuse an int where a float stands
        config = TypeAdapter(Config).validate_python(asdict(config))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and "[" not in part)
        flag = "--" + key.replace("_", "-")
        need = f"{key} to true or false" if first["type"] == "bool_type" else flag    # as a TOML has it
        raise RequestError(f"{key}={first['input']!r}: {first['msg'].lower()}; set {need}") from error
    cores = os.cpu_count() or 1
    if config.train.threads > cores:
        raise RequestError(f"train.threads={config.train.threads} is more than the {cores} cores of this machine; set "
                           f"--train.threads to at most {cores}")
    m, t = config.model.resolve(), config.train
    if m.n_heads % m.n_kv_heads:
        raise RequestError(f"model.n_heads={m.n_heads} is no multiple of model.n_kv_heads={m.n_kv_heads}; "
                           "set --model.n-kv-heads to a divisor")
    if m.position == "rope" and m.head_dim % 2:
        raise RequestError(f"model.head_dim={m.head_dim} is odd, and rope turns pairs of channels; "
                           "set --model.head-dim to an even number or --model.position learned")
    if t.batch_tokens % m.seq_len:
        below = max(1, t.batch_tokens // m.seq_len) * m.seq_len
        raise RequestError(f"train.batch_tokens={t.batch_tokens} is no multiple of model.seq_len={m.seq_len}; "
                           f"set --train.batch-tokens {below} or {below + m.seq_len}")
    if t.fp8:
        if t.dtype == "float32":
            raise RequestError("train.fp8 goes with bfloat16, and train.dtype is float32; leave one of them out")
        for name, size in (("dim", m.dim), ("ffn_dim", m.ffn_dim), ("seq_len", m.seq_len), ("head_dim", m.head_dim)):
            if size % 16:
                raise RequestError(f"model.{name}={size}: train.fp8 needs multiples of 16; set "
                                   f"--model.{name.replace('_', '-')} {-(-size // 16) * 16}, or leave --train.fp8 out")
    sequences = t.batch_tokens // m.seq_len
    if t.micro_batch and sequences % t.micro_batch:
        divisor = max(d for d in range(1, t.micro_batch + 1) if sequences % d == 0)
        raise RequestError(f"train.micro_batch={t.micro_batch} does not divide the {sequences} sequences of one step; "
                           f"set --train.micro-batch {divisor}")
    return config
