from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from forge.config import Config, ModelConfig, RequestError, load_json, load_toml, merge, save_json, validate
from forge.model.transformer import Transformer
from forge.presets import PRESETS, preset

GPT2 = {"gpt2-124m": 124_439_808, "gpt2-350m": 354_823_168, "gpt2-774m": 774_030_080, "gpt2-1558m": 1_557_611_200}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_builds_and_counts_its_parameters(name: str) -> None:
    config = validate(preset(name)).model
    config = dataclasses.replace(config, vocab_size=config.vocab_size or 32_768).resolve()
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    assert config.parameters == GPT2.get(name, config.parameters)
    matrices = sum(p.numel() for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2)
    assert matrices + config.vocab_size * config.dim == config.matrix_parameters


@pytest.mark.parametrize("changes", [{"norm": "layer"}, {"bias": True, "mlp": "swiglu"}, {"tied": True}, {"mlp": "gelu"},
                                     {"position": "learned"}, {"n_kv_heads": 1, "head_dim": 10}, {"qk_norm": False}])
def test_parameters_of_every_switch(changes: dict) -> None:
    config = dataclasses.replace(ModelConfig(vocab_size=11, seq_len=8, dim=16, n_layers=2, n_heads=2), **changes).resolve()
    assert sum(p.numel() for p in Transformer(config).parameters()) == config.parameters


def test_flops_a_token_counted_by_hand() -> None:
    config = ModelConfig(vocab_size=10, seq_len=8, dim=4, n_layers=3, n_heads=2, head_dim=2, ffn_dim=5, mlp="gelu",
                         window=3, full_every=3).resolve()
    matrices = 3 * (4 * 4 * 4 + 2 * 4 * 5) + 10 * 4
    full = sum(range(1, 9)) / 8                                 # keys that a query sees on average
    windowed = sum(min(i, 3) for i in range(1, 9)) / 8
    assert config.matrix_parameters == matrices
    assert config.flops_per_token() == pytest.approx(6 * matrices + 12 * 2 * 2 * (full + 2 * windowed))


def test_three_windowed_layers_to_one_full_and_the_last_full() -> None:
    config = ModelConfig(n_layers=6, window=16)
    assert [config.layer_window(i) for i in range(6)] == [16, 16, 16, None, 16, None]


@pytest.mark.parametrize(("values", "words"), [
    ({"model": {"dmi": 3}}, ["model.dmi", "did you mean dim?"]),
    ({"trian": {}}, ["trian", "did you mean train?"]),
    ({"model": 3}, ["model", "3"]),
])
def test_an_unknown_key_names_its_neighbour(values: dict, words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        merge(Config(), values, "file")
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(("values", "words"), [
    ({"train": {"steps": -5}}, ["train.steps=-5", "greater than or equal to 1", "--train.steps"]),
    ({"train": {"minutes": 0}}, ["train.minutes"]),
    ({"train": {"minutes": float("nan")}}, ["train.minutes"]),
    ({"model": {"dim": "wide"}}, ["model.dim='wide'", "--model.dim"]),
    ({"model": {"norm": "batch"}}, ["model.norm", "layer"]),
    ({"model": {"dim": 100, "n_heads": 6}}, ["model.dim=100", "model.n_heads=6", "--model.n-heads"]),
    ({"model": {"n_heads": 6, "n_kv_heads": 4}}, ["n_kv_heads=4", "--model.n-kv-heads"]),
    ({"model": {"dim": 18, "n_heads": 6}}, ["head_dim=3", "rope"]),
    ({"train": {"batch_tokens": 1000}, "model": {"seq_len": 256}}, ["1000", "--train.batch-tokens 768 or 1024"]),
    ({"train": {"batch_tokens": 1024, "micro_batch": 3}, "model": {"seq_len": 256}}, ["--train.micro-batch 2"]),
    ({"model": {"dropout": 1.0}}, ["model.dropout"]),
    ({"seed": -1}, ["seed=-1"]),
])
def test_an_impossible_value_says_what_to_set(values: dict, words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        validate(merge(Config(), values, "file"))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unknown_preset_names_its_neighbour() -> None:
    with pytest.raises(RequestError, match="gpt2-124m"):
        preset("gpt2-124")


def test_toml_is_laid_over_the_preset_and_json_keeps_all(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("seed = 7\n[train]\nminutes = 2\n[model]\nwindow = 8\n")
    config = load_toml(preset("gpt-10m"), str(tmp_path / "c.toml"))
    assert (config.seed, config.train.minutes, config.model.window, config.model.dim) == (7, 2, 8, 384)
    save_json(config, tmp_path / "c.json")
    assert load_json(tmp_path / "c.json") == config


@pytest.mark.parametrize("line", ['fp8 = "yes"', "compile = 1", 'deterministic = "off"'])
def test_what_is_no_boolean_is_not_taken_for_one(line: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f"[train]\n{line}\n")
    name = line.split()[0]
    with pytest.raises(RequestError, match=f"train.{name}=.*valid boolean; set train.{name} to true or false"):
        load_toml(Config(), str(tmp_path / "c.toml"))


def test_a_broken_toml_is_a_request_error(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("seed = = 7\n")
    with pytest.raises(RequestError, match="not TOML"):
        load_toml(Config(), str(tmp_path / "c.toml"))
    with pytest.raises(RequestError, match="No such file"):
        load_toml(Config(), str(tmp_path / "d.toml"))
