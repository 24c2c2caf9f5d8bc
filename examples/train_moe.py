"""Train a mixture of experts of transformers, patched by `warploom.patch` and as it was, in turns.

    python examples/train_moe.py            # 4 layers of 32 experts, bf16
    python examples/train_moe.py --tiny     # seconds, also without a GPU

Both models begin with the same weights and see the same bytes of Python's own documentation: their
losses differ by rounding.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

import python_texts
import timing
import warploom
from learning import advance, summary
from llama import device_name

LEARNING_RATE = 1e-3
ROUNDS = 5  # of steps that are timed, behind those whose losses are told


def tiny_or_whole(tiny: bool) -> Qwen3MoeConfig:
    """A Qwen3-MoE of bytes."""
    width, experts = (64, 8) if tiny else (512, 32)
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=width,
        num_hidden_layers=2 if tiny else 4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        intermediate_size=2 * width,
        moe_intermediate_size=width // 2,
        num_experts=experts,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        pad_token_id=None,
    )


@click.command()
@click.option("--tiny", is_flag=True, help="2 layers of 8 experts and width 64, for a CPU.")
@click.option("--steps", type=click.IntRange(1), help="Whose losses are told: 200, tiny 20.")
@click.option("--batch", type=click.IntRange(1), help="Rows a step: 32, tiny 4.")
@click.option("--context", type=click.IntRange(2), help="Bytes of a row: 512, tiny 32.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    *, tiny: bool, steps: int | None, batch: int | None, context: int | None, as_json: bool
) -> None:
    """Train a mixture of experts with Warploom's kernels and with torch's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps, batch = steps or (20 if tiny else 200), batch or (4 if tiny else 32)
    text = python_texts.load(docstrings=not tiny).training.long()
    context = context or (32 if tiny else 512)
    if context > len(text):
        raise click.UsageError(f"--context {context}: must be at most {len(text)}, all of the text")
    rows = text.unfold(0, context, 1)
    drawn = torch.randint(len(rows), (steps, batch), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(tiny_or_whole(tiny)).bfloat16().to(device).train()
    models: dict[str, Any] = {"torch": model, "warploom": copy.deepcopy(model)}
    patch = warploom.patch(models["warploom"])
    losses, calls = {}, dict[str, Callable[[], object]]()
    for name, one in models.items():
        step = partial(advance, one, torch.optim.AdamW(one.parameters(), lr=LEARNING_RATE))
        losses[name] = torch.stack([step(rows[at].to(device)) for at in drawn]).tolist()
        calls[name] = partial(step, rows[drawn[0]].to(device))
    seconds = timing.medians(timing.interleave(calls, device, rounds=ROUNDS))
    found = {
        "device": device_name(device),
        "patch": repr(patch),
        "losses": losses,
        "seconds": seconds,
    }
    click.echo(json.dumps(found, indent=2) if as_json else told(found))


def told(found: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [f"{found['patch']}", f"on {found['device']}:"]
    return "\n".join([*lines, *summary(found["losses"], found["seconds"])])


if __name__ == "__main__":
    main()
