"""Training of the GPT step by step: bf16 computes, fp32 weights are updated, checkpoints go on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import checkpoint
from gpt import Gpt, Implementation, Size, next_byte_loss
from python_texts import Texts
from warploom.float8 import Recipe

VALIDATION_BATCHES = 4
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a weight


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides a run, to the last bit on one machine; `batch` is in rows of `context` bytes."""

    size: Size
    implementation: Implementation
    compile: bool
    seed: int
    steps: int
    batch: int
    learning_rate: float  # the highest of the run
    texts: str  # the digest of the texts
    recipe: Recipe | None = None  # of fp8
    dropout_blocks: float = 0.0  # the probability of a block to be dropped
    fp32: bool = False  # compute in fp32 in place of bf16


class Trainer:
    """A model with its optimiser, after so many steps; `losses` are those of the steps.

    The model computes in bf16 and has bf16 gradients, or in fp32 and has fp32 ones. Its weights are
    copies of fp32 master weights, which AdamW updates: most updates are too small for the 8 bits of
    a bf16 weight.
    """

    def __init__(self, settings: Settings, texts: Texts, device: torch.device) -> None:
        self.settings = settings
        self._training = texts.training.to(device)
        self._validation = texts.validation.to(device)
        self.model = Gpt(
            settings.size,
            settings.implementation,
            settings.seed,
            settings.recipe,
            settings.dropout_blocks,
        ).to(device)
        self.masters = {
            name: weight.detach().clone() for name, weight in self.model.named_parameters()
        }
        if not settings.fp32:
            self.model.bfloat16()
        matrices = [weight for weight in self.masters.values() if weight.ndim == 2]
        vectors = [weight for weight in self.masters.values() if weight.ndim != 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self._compute = torch.compile(self.model) if settings.compile else self.model
        self._losses: list[torch.Tensor] = []

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self._losses)

    @property
    def losses(self) -> list[float]:
        """The loss of each step so far; waits for the GPU."""
        return torch.stack(self._losses).tolist() if self._losses else []

    def advance(self) -> None:
        """Do one step; the host does not wait for the GPU."""
        text = self._draw(self._training, self.settings.seed, self.step)
        if self.settings.dropout_blocks:  # a run that goes on drops what it would have dropped
            torch.manual_seed((self.settings.seed << 32) + self.step)
        self.model.train()
        loss = next_byte_loss(self._compute(text[:, :-1]), text[:, 1:])
        torch.autograd.backward(loss)
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None  # noqa: S101 (for type checkers)
            self.masters[name].grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self._optimizer.step()
        self._copy_masters()
        self._losses.append(loss.detach())

    @torch.no_grad()
    def validate(self) -> float:
        """The loss over batches of the validation text that are the same for every run."""
        losses = []
        self.model.eval()
        for index in range(VALIDATION_BATCHES):
            text = self._draw(self._validation, 0, index)
            losses.append(next_byte_loss(self._compute(text[:, :-1]), text[:, 1:]))
        return float(torch.stack(losses).mean())

    @torch.no_grad()
    def sample(self, count: int, temperature: float = 0.8) -> str:
        """Write `count` bytes after a line's end, at most the context; the seed decides which.

        The row is always as long as the context: each length would be a shape of its own. The
        bytes after the one that is asked for are not seen.
        """
        self.model.eval()
        generator = torch.Generator().manual_seed(self.settings.seed)
        row = torch.zeros(1, self.settings.size.context, dtype=torch.int64)
        row[0, 0] = ord("\n")
        last = min(count, row.shape[1] - 1)
        for index in range(last):
            logits = self.model(row.to(self._training.device))[0, index].float().cpu()
            likely = torch.softmax(logits / temperature, dim=0)
            row[0, index + 1] = torch.multinomial(likely, 1, generator=generator)[0]
        return bytes(row[0, 1 : last + 1].tolist()).decode(errors="replace")

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        tensors = {f"weight.{name}": weight for name, weight in self.masters.items()}
        for name, weight in self.masters.items():
            kept = self._optimizer.state[weight]
            tensors |= {f"{moment}.{name}": kept[moment] for moment in MOMENTS}
        tensors["losses"] = torch.stack(self._losses)
        checkpoint.write(path, tensors, asdict(self.settings))

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """Go on from a checkpoint, as if the run had not stopped; ClickException if of another."""
        tensors, about = checkpoint.read(path)
        if about != asdict(self.settings):
            ours = asdict(self.settings)
            other = ", ".join(
                f"{key} {about.get(key)}" for key in ours if about.get(key) != ours[key]
            )
            raise click.ClickException(
                f"{path}: a run of {other}: must be of the same settings and texts as this one: "
                "give the options that it began with"
            )
        for name, weight in self.masters.items():
            weight.copy_(tensors[f"weight.{name}"])
            self._optimizer.state[weight] = {
                moment: tensors[f"{moment}.{name}"].to("cpu" if moment == "step" else weight.device)
                for moment in MOMENTS
            }
        self._losses = list(tensors["losses"].to(self._training.device))
        self._copy_masters()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.masters[name])

    def _draw(self, source: torch.Tensor, seed: int, index: int) -> torch.Tensor:
        """Rows from random places, [batch, context + 1]; seed and index alone decide which."""
        length = self.settings.size.context + 1
        random = np.random.default_rng((seed, index))
        starts = random.integers(0, source.numel() - length, size=(self.settings.batch, 1))
        places = torch.from_numpy(starts + np.arange(length)).to(source.device)
        return source[places].long()

    def _learning_rate(self) -> float:
        """The learning rate: linear over the first twentieth, then half a cosine to a tenth."""
        steps, highest = self.settings.steps, self.settings.learning_rate
        first = max(1, steps // 20)
        if self.step < first:
            return highest * (self.step + 1) / first
        share = (self.step - first) / max(1, steps - first)
        return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


@contextmanager
def deterministic() -> Iterator[None]:
    """Run kernels that give the same bits each time: torch's, and Warploom's follow torch."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS asks for
    torch_settings: Any = torch.utils.deterministic
    filled = torch_settings.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    torch_settings.fill_uninitialized_memory = False  # a kernel for each new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch_settings.fill_uninitialized_memory = filled
