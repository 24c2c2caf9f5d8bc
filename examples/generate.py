"""Greedy generation by a Llama with a static cache, patched by `warploom.patch` and not, in turns.

    python examples/generate.py                            # random weights: only the speed counts
    python examples/generate.py --graph --batch 32 --prompt-tokens 512 --cache 2048
    python examples/generate.py --model PATH --prompt "Once upon a time"
    python examples/generate.py --tiny

Both must choose the same tokens. Where they part, the two tokens' logits must be so close that
rounding of bf16 decides: how far it moves logits there, the model itself tells, beside a copy of it
in fp32. Exit code 3: they are not.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import timing
import warploom
from llama import device_name, random_llama
from steps import Steps

WRONG = 3  # the exit code
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the tokens of a row differ first: how far apart their logits are, and may be.

    The logits are those of fp32. Where rounding alone had the two models choose, it moved the two
    logits towards each other by so much, in one of them; each may have moved by `allowed` / 2.
    """

    row: int
    position: int
    difference: float
    allowed: float

    @property
    def by_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.difference <= self.allowed


@click.command()
@click.option("--tiny", is_flag=True, help="2 layers of width 64, for a CPU.")
@click.option("--model", "folder", type=FOLDER, help="A local model in place of random weights.")
@click.option("--prompt", help="The text that a local model goes on with.")
@click.option("--prompt-tokens", type=click.IntRange(1), help="Of random weights: 128, tiny 16.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), help="128, tiny 8.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--compile/--no-compile", "compiled", default=False, help="As transformers does it.")
@click.option("--graph", is_flag=True, help="Each token a replay of one CUDA graph of a step.")
@click.option("--cache", type=click.IntRange(1), help="Tokens that --graph has room for.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    *,
    tiny: bool,
    folder: Path | None,
    prompt: str | None,
    prompt_tokens: int | None,
    batch: int,
    new_tokens: int | None,
    rounds: int,
    compiled: bool,
    graph: bool,
    cache: int | None,
    as_json: bool,
) -> None:
    """Generate with a Llama on Warploom's kernels and on torch's, and compare tokens and speed."""
    if (folder is None) != (prompt is None):
        raise click.UsageError("--model and --prompt: must be given together, or neither")
    if graph and compiled:
        raise click.UsageError("--graph and --compile: must be one of them; both capture steps")
    if cache is not None and not graph:
        raise click.UsageError("--cache: must come with --graph; else transformers decides")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = None if folder is None else AutoTokenizer.from_pretrained(folder)
    model = random_llama(device, tiny=tiny) if folder is None else local(folder, device)
    if tokenizer is None:
        length = prompt_tokens or (16 if tiny else 128)
        text = torch.randint(0, model.config.vocab_size, (batch, length))
    else:
        text = tokenizer([prompt] * batch, return_tensors="pt").input_ids
    text = text.to(device)
    models = {"torch": model.eval(), "warploom": copy.deepcopy(model).eval()}
    warploom.patch(models["warploom"])
    count = new_tokens or (8 if tiny else 128)
    keys = cache or text.shape[1] + count
    calls = {
        name: partial(Steps(one, batch, keys).generate, text, count)
        if graph
        else partial(generate, one, text, count, compiled=compiled)
        for name, one in models.items()
    }
    tokens = {name: call() for name, call in calls.items()}
    partings = compare(model, tokens["warploom"], tokens["torch"], text.shape[1])
    seconds = timing.interleave(calls, device, rounds=rounds)
    made = {name: batch * (some.shape[1] - text.shape[1]) for name, some in tokens.items()}
    result = {
        "device": device_name(device),
        "tokens": made,
        "tokens per second": {
            name: made[name] / taken for name, taken in timing.medians(seconds).items()
        },
        "rounds": seconds,
        "partings": [{**asdict(one), "by rounding": one.by_rounding} for one in partings],
        "text": tokenizer.decode(tokens["warploom"][0]) if tokenizer else None,
    }
    click.echo(json.dumps(result, indent=2) if as_json else told(result))
    if not all(one.by_rounding for one in partings):
        raise click.exceptions.Exit(WRONG)


def local(folder: Path, device: torch.device) -> Any:  # noqa: ANN401 (as random_llama)
    """A model of files on this machine, in bf16; nothing is downloaded."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    return model.to(device)


@torch.no_grad()
def generate(
    model: Any,  # noqa: ANN401
    text: torch.Tensor,
    count: int,
    *,
    compiled: bool,
) -> torch.Tensor:
    """Tokens [batch, length] with up to `count` more, each the likeliest."""
    tokens: torch.Tensor = model.generate(
        text,
        attention_mask=torch.ones_like(text),
        max_new_tokens=count,
        do_sample=False,
        cache_implementation="static",
        disable_compile=not compiled,
    )
    return tokens


@torch.no_grad()
def compare(
    model: Any,  # noqa: ANN401
    ours: torch.Tensor,
    peers: torch.Tensor,
    begin: int,
) -> list[Parting]:
    """Where rows part after the first `begin` tokens, by the logits of `model` there, in fp32.

    What follows a row's first difference is another text, and is not compared.
    """
    partings = []
    exact = None
    length = min(ours.shape[1], peers.shape[1])
    for row, differ in enumerate((ours[:, begin:length] != peers[:, begin:length]).tolist()):
        if True in differ:
            position = begin + differ.index(True)
            exact = exact or copy.deepcopy(model).float()
            text = ours[row : row + 1, :position]
            rounded, logits = (some(text).logits[0, -1].float() for some in (model, exact))
            one, other = logits[ours[row, position]], logits[peers[row, position]]
            allowed = 2 * float((rounded - logits).abs().max())
            partings.append(Parting(row, position, float((one - other).abs()), allowed))
    return partings


def told(result: dict[str, Any]) -> str:
    """The result for a person."""
    speed = result["tokens per second"]
    lines = [
        f"{name:<9} {speed[name]:8.1f} tokens a second on {result['device']}" for name in speed
    ]
    lines.append(f"ratio     {speed['warploom'] / speed['torch']:8.3f}")
    lines += [
        f"row {one['row']} parts at token {one['position']}: logits differ by "
        f"{one['difference']:.3g}, {one['allowed']:.3g} is rounding"
        for one in result["partings"]
    ]
    lines += [] if result["partings"] else ["every token agrees"]
    lines += [result["text"]] if result["text"] else []
    return "\n".join(lines)


if __name__ == "__main__":
    main()
