"""A training step of a Llama, patched by `warploom.patch` and as transformers has it, in turns.

    python examples/llama_step.py                  # on a Hopper GPU: 4 layers of Llama 3 8B
    python examples/llama_step.py --mode reduce-overhead    # compiled into CUDA graphs
    python examples/llama_step.py --profile        # and which kernels take the time
    python examples/llama_step.py --recipe ALL     # bf16 and every recipe, 8192 tokens, compiled
    python examples/llama_step.py --recipe ALL --vocabulary 128256 --optimizer
    python examples/llama_step.py --tiny --no-compile

Forward and backward pass of one sequence, in bf16. Before anything is timed, losses and gradients
are held against float32: of what is patched, none may be further off than half as much again as
without the patch. Exit code 3: one is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, Literal

import click
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import recipe_steps
import timing
import warploom
from llama import device_name, random_llama
from warploom.float8 import RECIPES, Recipe

ALL = "ALL"  # recipes
WRONG = 3  # the exit code
ROUNDS = 12
LAPS = 3  # steps in a row, so that the GPU does not wait for the host to begin
ALLOWED = 1.5  # times the error without the patch
ROUNDING, ROUNDING_FP8 = 2**-8, 2**-2  # beside it: one of bf16; of e5m2
KERNELS = 15  # of a profile
PEERS = {"warploom": "torch", "warploom, compiled": "torch, compiled"}


@dataclass(frozen=True, slots=True)
class Contender:
    """What is timed: `call` returns the outputs of transformers by the parameters of `model`."""

    model: nn.Module
    call: Callable[..., Any]
    text: torch.Tensor

    def step(self) -> torch.Tensor:
        """Compute the loss and fresh gradients; return the loss."""
        self.model.zero_grad()
        loss: torch.Tensor = self.call(input_ids=self.text, labels=self.text, use_cache=False).loss
        torch.autograd.backward(loss)
        return loss.detach()

    def errors(self, exact: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Relative distances from `exact`: of the loss, and of each gradient by its name."""
        found = {"loss": _distance(self.step(), exact["loss"])}
        for name, gradient in _gradients(self.model).items():
            found[name] = _distance(gradient, exact[name])
        return found


@click.command()
@click.option("--tiny", is_flag=True, help="2 layers of width 64, for a CPU.")
@click.option("--tokens", type=click.IntRange(2), help="2048, of ALL 8192, tiny 32.")
@click.option("--rounds", type=click.IntRange(1), help="12, of ALL 5.")
@click.option("--vocabulary", type=click.IntRange(1), help="32000, tiny 128: of ALL alone.")
@click.option("--optimizer", is_flag=True, help="Time AdamW too: of ALL alone.")
@click.option("--compile/--no-compile", "compiled", default=True, help="Also by torch.compile.")
@click.option(
    "--mode",
    type=click.Choice(["default", "reduce-overhead"]),
    default="default",
    show_default=True,
    help="Of torch.compile; reduce-overhead captures CUDA graphs.",
)
@click.option(
    "--recipe",
    type=click.Choice([*RECIPES, ALL]),
    help=f"Linear layers in fp8; {ALL}: bf16 and every recipe in turns.",
)
@click.option("--profile", is_flag=True, help="Show the kernels that take most of the time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    *,
    tiny: bool,
    tokens: int | None,
    rounds: int | None,
    vocabulary: int | None,
    optimizer: bool,
    compiled: bool,
    mode: str,
    recipe: Recipe | Literal["ALL"] | None,
    profile: bool,
    as_json: bool,
) -> None:
    """Time a training step of a Llama on Warploom's kernels beside torch's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if recipe != ALL and (vocabulary or optimizer):
        raise click.UsageError("--vocabulary, --optimizer: must come with --recipe ALL")
    tokens = tokens or (32 if tiny else 8192 if recipe == ALL else 2048)
    model = random_llama(device, tiny=tiny, vocabulary=vocabulary).train()
    if recipe == "ALL":
        text = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
        rounds = rounds or recipe_steps.ROUNDS
        options: dict[str, Any] = {"compiled": compiled, "optimizer": optimizer, "rounds": rounds}
        found = {
            "device": device_name(device),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "tokens": tokens,
            "vocabulary": model.config.vocab_size,
            **recipe_steps.measure(model, text, **options),
        }
        click.echo(json.dumps(found, indent=2) if as_json else recipe_steps.table(found))
        return
    patched = copy.deepcopy(model)
    patch = warploom.patch(patched, recipe=recipe)
    text = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
    models = {"torch": model, "warploom": patched}
    contenders = contend(models, text, mode if compiled else None)
    result: dict[str, Any] = {
        "device": device_name(device),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens": tokens,
        "patch": repr(patch),
        **check(contenders, ROUNDING_FP8 if recipe else ROUNDING),
    }
    if not result["wrong"]:
        result |= measure(contenders, device, rounds or ROUNDS)
        if profile:
            result["kernels"] = {name: kernels(one, device) for name, one in contenders.items()}
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        show(result)
    if result["wrong"]:
        raise click.exceptions.Exit(WRONG)


def contend(
    models: Mapping[str, nn.Module], text: torch.Tensor, mode: str | None
) -> dict[str, Contender]:
    """The contenders by the names that they are shown by: each model, and compiled in a mode."""
    found = {name: Contender(one, one, text) for name, one in models.items()}
    if mode is not None:
        for name, one in models.items():
            faster = torch.compile(one, dynamic=False, mode=mode)
            found[f"{name}, compiled"] = Contender(one, faster, text)
    return found


def measure(
    contenders: Mapping[str, Contender], device: torch.device, rounds: int
) -> dict[str, Any]:
    """Seconds of a step by round, their medians, and torch's over Warploom's."""
    calls = {name: one.step for name, one in contenders.items()}
    seconds = timing.interleave(calls, device, rounds=rounds, laps=LAPS)
    medians = timing.medians(seconds)
    ratios = {
        name: medians[peer] / medians[name] for name, peer in PEERS.items() if name in medians
    }
    return {"rounds": seconds, "seconds": medians, "ratios": ratios}


# ---- Checking ------------------------------------------------------------------------------------


def check(contenders: Mapping[str, Contender], rounding: float) -> dict[str, Any]:
    """How far each is from float32 in its loss and its gradients, and what is too far."""
    exact = float32(contenders["torch"])
    errors = {name: one.errors(exact) for name, one in contenders.items()}
    wrong = {
        name: furthest(errors[name], errors[PEERS[name]], rounding)
        for name in errors
        if name in PEERS
    }
    return {
        "errors": {
            name: {"loss": found["loss"], "gradient": max(found.values())}
            for name, found in errors.items()
        },
        "wrong": {name: found for name, found in wrong.items() if found},
    }


def float32(contender: Contender) -> dict[str, torch.Tensor]:
    """The loss and each gradient, by its name, of the same weights in float32."""
    model = copy.deepcopy(contender.model).float()
    loss = Contender(model, model, contender.text).step()
    return {"loss": loss, **_gradients(model)}


def furthest(
    errors: Mapping[str, float], peers: Mapping[str, float], rounding: float = ROUNDING
) -> str:
    """The name of what is further off than is allowed, and than all else; "" if nothing is."""
    beyond = {name: errors[name] - ALLOWED * peer - rounding for name, peer in peers.items()}
    name = max(beyond, key=lambda one: inf if isnan(beyond[one]) else beyond[one])
    return "" if beyond[name] <= 0 else name


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.float() - exact).norm() / exact.norm())


# ---- Showing -------------------------------------------------------------------------------------


def kernels(contender: Contender, device: torch.device) -> list[dict[str, Any]]:
    """The kernels, or on a CPU the operators, of a step that take most of the time."""
    kinds = torch.profiler.ProfilerActivity
    on_gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU]) as profiler:
        contender.step()
        if on_gpu:
            torch.cuda.synchronize()
    found = [
        {
            "name": one.key,
            "calls": one.count,
            "microseconds": one.self_device_time_total if on_gpu else one.self_cpu_time_total,
        }
        for one in profiler.key_averages()
    ]
    return sorted(found, key=lambda one: -one["microseconds"])[:KERNELS]


def show(result: Mapping[str, Any]) -> None:
    """Print the result for a person."""
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    title = f"Llama, {result['tokens']} tokens, {result['device']}"
    rows = []
    for name, errors in result["errors"].items():
        seconds = result.get("seconds", {}).get(name)
        ratio = result.get("ratios", {}).get(name)
        rows.append(
            [
                name,
                f"{1e3 * seconds:.2f}" if seconds else "-",
                f"{ratio:.3f}" if ratio else "-",
                f"{errors['loss']:.1e}",
                f"{errors['gradient']:.1e}",
            ]
        )
    columns = ["", "ms", "torch / warploom", "error of the loss", "largest of a gradient"]
    console.print(_table(title, columns, rows))
    console.print(result["patch"], soft_wrap=True)
    for name, found in result.get("kernels", {}).items():
        listed = [[one["name"], f"{one['calls']}", f"{one['microseconds']:.0f}"] for one in found]
        console.print(_table(name, ["kernel", "calls", "us"], listed))
    for name, parameter in result["wrong"].items():
        console.print(f"{name}: {parameter} is further from float32 than without the patch")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        if index:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    main()
