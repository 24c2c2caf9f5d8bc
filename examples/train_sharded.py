"""Train a Llama over several GPUs by FSDP2, in bf16 and in fp8, with weights gathered in each.

    torchrun --nproc-per-node 2 examples/train_sharded.py
    torchrun --nproc-per-node 2 examples/train_sharded.py --tiny    # seconds, also without a GPU

All models begin with the same weights, and each process sees texts of its own. "fp8" multiplies in
fp8 what was gathered in bf16, "fp8 gathered" gathers weights in fp8: half of the bytes. Their
losses differ by rounding alone.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import timing
import warploom
from learning import advance, summary
from llama import device_name, random_llama
from warploom.float8 import Float8LinearConfig, convert_to_float8_training

LEARNING_RATE = 1e-4
ROUNDS = 5  # of steps that are timed, after those whose losses are printed
FP8 = {
    "fp8": Float8LinearConfig(),
    "fp8 gathered": Float8LinearConfig(enable_fsdp_float8_all_gather=True),
}


@contextmanager
def processes() -> Iterator[torch.device]:
    """The group of the processes that torchrun started, or of this one alone; its device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if rank >= gpus:
            raise click.UsageError(
                f"process {rank} of this host has no GPU, of which there are {gpus}: start one for "
                f"each, as by `torchrun --nproc-per-node {gpus}`"
            )
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend)
        else:
            meeting = f"file://{folder}/meeting"
            dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        try:
            yield device
        finally:
            dist.destroy_process_group()


def sharded(model: Any, config: Float8LinearConfig | None) -> Any:  # noqa: ANN401 (of transformers)
    """The model on Warploom's kernels, whose decoder layers are gathered one after another."""
    if config is not None:
        convert_to_float8_training(model.model.layers, config=config)
    warploom.patch(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@click.command()
@click.option("--tiny", is_flag=True, help="2 layers of width 64, for a CPU.")
@click.option("--steps", type=click.IntRange(1), help="Steps whose losses are printed: 20, tiny 5.")
@click.option("--tokens", type=click.IntRange(2), help="Of each process's text: 4096, tiny 32.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(*, tiny: bool, steps: int | None, tokens: int | None, as_json: bool) -> None:
    """Train a Llama by FSDP2 in bf16 and in fp8."""
    steps, tokens = steps or (5 if tiny else 20), tokens or (32 if tiny else 4096)
    with processes() as device:
        drawing = torch.Generator().manual_seed(dist.get_rank())
        model = random_llama(device, tiny=tiny).train()
        size = (1, tokens)
        text = torch.randint(model.config.vocab_size, size, generator=drawing).to(device)
        losses, calls = {}, dict[str, Callable[[], object]]()
        for name, config in {"bf16": None, **FP8}.items():
            one = sharded(copy.deepcopy(model), config)
            adam = torch.optim.AdamW(one.parameters(), lr=LEARNING_RATE)
            step = partial(advance, one, adam, text)
            own = torch.stack([step() for _ in range(steps)])
            dist.all_reduce(own)
            losses[name] = (own / dist.get_world_size()).tolist()
            calls[name] = step
        result = {
            "device": device_name(device),
            "processes": dist.get_world_size(),
            "tokens": tokens,
            "losses": losses,
            "seconds": timing.medians(timing.interleave(calls, device, rounds=ROUNDS)),
        }
        if dist.get_rank() == 0:
            click.echo(json.dumps(result, indent=2) if as_json else report(result))


def report(result: dict[str, Any]) -> str:
    """The result for a person."""
    device = result["device"]
    first = f"{result['processes']} processes with {result['tokens']} tokens each, {device}:"
    return "\n".join([first, *summary(result["losses"], result["seconds"])])


if __name__ == "__main__":
    main()
