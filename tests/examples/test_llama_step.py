"""examples/llama_step.py, tiny: what is timed was compared first, and with float32."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import LlamaForCausalLM

import llama_step
import recipe_steps
import warploom
from llama import random_llama

SHORT = ("--tiny", "--no-compile", "--rounds", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(llama_step.main, [*SHORT, *arguments])


def test_a_step_is_compared_and_timed() -> None:
    done = run("--json", "--profile")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == {}
    assert found["errors"].keys() == found["seconds"].keys() == {"torch", "warploom"}
    for errors in found["errors"].values():
        assert 0 < errors["gradient"] < 0.02 and errors["loss"] < 0.001
    times = found["seconds"]
    assert found["ratios"] == {"warploom": times["torch"] / times["warploom"]}
    assert {one["name"] for one in found["kernels"]["torch"]} >= {"aten::mm"}


def test_a_person_is_shown_times_and_kernels() -> None:
    done = run("--profile")
    assert done.exit_code == 0, done.output
    assert "torch / warploom" in done.stdout and "aten::mm" in done.stdout


def test_a_patch_that_changes_the_result_is_named_and_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(model: LlamaForCausalLM, recipe: None) -> None:
        model.model.layers[1].mlp.down_proj.weight.data *= 1.1

    monkeypatch.setattr(warploom, "patch", wrong)
    done = run("--json")
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert "seconds" not in found and found["wrong"].keys() == {"warploom"}
    assert "further from float32" in run().stdout


def test_every_gradient_is_held_against_that_of_float32() -> None:
    model, patched = (random_llama(torch.device("cpu"), tiny=True) for _ in range(2))
    warploom.patch(patched)
    text = torch.arange(16)[None]
    models = {"torch": model, "warploom": patched}
    contenders = llama_step.contend(models, text, None)
    exact = llama_step.float32(contenders["torch"])
    names = {name for name, _ in model.named_parameters()}
    assert exact.keys() == {"loss", *names} and len(names) == 21
    assert all(one.dtype == torch.float32 for one in exact.values())
    assert contenders["warploom"].errors(exact).keys() == exact.keys()


@pytest.mark.parametrize(
    ("error", "named"), [(0.011, ""), (0.0188, ""), (0.02, "b"), (1.0, "b"), (nan, "b")]
)
def test_half_as_much_again_is_allowed_and_one_rounding(error: float, named: str) -> None:
    peers = {"a": 0.5, "b": 0.01}
    assert llama_step.furthest({"a": 0.01, "b": error}, peers) == named


def test_every_recipe_takes_its_turn_beside_bf16() -> None:
    done = run("--recipe", "ALL", "--json", "--vocabulary", "200", "--optimizer")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found["seconds"]) == ["torch, bf16", "warploom, bf16", *recipe_steps.RECIPES]
    assert found["vocabulary"] == 200 and found["optimizer"]
    assert found["bf16 / recipe"].keys() == set(recipe_steps.RECIPES)
    exact = found["losses"].pop("torch, bf16")
    assert all(abs(loss - exact) < 0.05 for loss in found["losses"].values())
    assert "rowwise_with_gw_hp" in run("--recipe", "ALL").stdout


def test_recipes_share_weights_and_differ_in_gradients() -> None:
    """A model that is not patched, or has weights of its own, would time something else."""
    model = random_llama(torch.device("cpu"), tiny=True).train()
    models = recipe_steps.contenders(model, compiled=False)
    text = torch.arange(16)[None]
    calls = recipe_steps.steps(models, text, optimizer=False)
    weight = model.model.layers[0].mlp.up_proj.weight
    gradients = []
    for name, other in models.items():
        assert other.model.layers[0].mlp.up_proj.weight is weight
        calls[name]()
        gradients.append(weight.grad.clone())
    assert all(not torch.equal(one, gradients[0]) for one in gradients[2:])


def test_options_of_all_recipes_are_refused_of_one() -> None:
    assert run("--recipe", "rowwise", "--optimizer").exit_code == 2
