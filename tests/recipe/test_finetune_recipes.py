"""Recipes of fine-tuning by adapters or for int8: contradictions are told with their place, and missing packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from prunekit.cli import cli
from prunekit.errors import RecipeError
from prunekit.recipe.loading import load
from prunekit.utils import availability


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("baseline: {adapter: lora}", r":3:21: baseline\.adapter: expected null, because all weights .* finetune\."),
        ("finetune: {adapter: lora, regularize: {method: bn_l1}}", r":3:\d+: finetune\.regularize: expected null"),
        ("finetune: {adapter: {rank: 2}, sharding: full}", r":3:\d+: finetune\.sharding: expected 'replicas'"),
        ("finetune: {adapter: lora}\nprune: {schedule: {kind: cubic, end: 1}}", r":4:\d+: prune\.schedule: expected"),
        ("finetune: {adapter: lora}\nprune: {pattern: {kind: '2:4'}}", r":4:\d+: prune\.pattern: .* fill its zeros"),
        (
            "finetune: {adapter: lora, clamp_weight_grad: {limit: 1.0, modules: [a]}}",
            r":3:\d+: finetune\.clamp_weight_grad\.modules: expected null",
        ),
        ("finetune: {adapter: ia3}", r":3:\d+: finetune\.adapter: expected 'lora', or a mapping"),
        ("finetune: {adapter: {rank: 0}}", r":3:\d+: finetune\.adapter\.rank: expected a whole number of at least 1"),
        ("task: embedding\nfinetune: {distill: {}}", r":4:\d+: finetune\.distill: expected nothing, because task is"),
        ("finetune: {fake_quantize: int4}", r":3:27: finetune\.fake_quantize: expected 'int8', or null, got 'int4'"),
        ("baseline: {fake_quantize: int8}", r":3:27: baseline\.fake_quantize: expected null, .*; set finetune\.fake"),
        ("finetune: {adapter: lora, fake_quantize: int8}", r":3:42: finetune\.fake_quantize: expected null, because"),
    ],
)
def test_contradictions_are_told_with_their_place(tmp_path: Path, lines: str, message: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: mine\nmodel: {{name: resnet18, weights: DEFAULT}}\n{lines}\n")
    with pytest.raises(RecipeError, match=message):
        load(recipe)


@pytest.mark.parametrize(
    ("setting", "package", "extra"), [("adapter: lora", "peft", "hf-train"), ("fake_quantize: int8", "torchao", "qat")]
)
def test_commands_say_that_a_package_is_missing(
    setting: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = availability.find_spec
    monkeypatch.setattr(availability, "find_spec", lambda name: None if name == package else real(name))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: mine\nmodel: {{zoo: cifar, name: resnet8}}\nbaseline: {{}}\nfinetune: {{{setting}}}\n")
    result = CliRunner().invoke(cli, ["finetune", str(recipe)])
    assert result.exit_code != 0
    key = setting.partition(":")[0]
    wanted = f'finetune.{key} needs {package}, not installed here: pip install "prunekit[{extra}]"'
    assert wanted in " ".join(result.output.split())
