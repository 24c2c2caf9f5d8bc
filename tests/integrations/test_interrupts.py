"""A patch that is interrupted at any line leaves a model as it was, and undo() can be finished."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interrupts import lines
from tiny_models import model

import warploom
from warploom.integrations import unpacked


def state(module: torch.nn.Module) -> list[object]:
    """All that a patch changes in a model, by identity."""
    found: list[object] = []
    for name, part in module.named_modules(remove_duplicate=False):
        config = getattr(part, "config", None)
        found += [name, id(part), part.training, getattr(config, "_attn_implementation", None)]
        found += [(key, id(value)) for key, value in part._parameters.items()]
        found += [[*part._forward_pre_hooks.values()], [*part._forward_pre_hooks_with_kwargs]]
        found += [[*part._forward_hooks.values()], sorted(vars(part))]
    return found


def plain() -> torch.nn.Module:
    """Layers in one place, in several, with hooks, and none."""
    shared = torch.nn.Linear(64, 64)
    inner = torch.nn.Sequential(shared, torch.nn.Linear(64, 64, bias=False))
    made = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), shared, shared, inner)
    made[0].register_forward_hook(lambda *given: None)
    return made.bfloat16()


def llama() -> torch.nn.Module:
    made: torch.nn.Module = model("Llama", "sdpa", num_hidden_layers=1)
    return made


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "plain": (plain, {}),
    "llama": (llama, {}),
    "int4": (plain, {"weights": {"format": "int4", "skip": ["4"]}, "attention": False}),
}


@pytest.mark.parametrize("case", MODELS)
def test_an_interrupted_patch_leaves_the_model_as_it_was(case: str) -> None:
    """Layers, attention, hooks and flags; and the model can be patched afterwards."""
    make, options = MODELS[case]
    files = ("patch", "unpacked", "linear_sharing")
    warploom.patch(make(), **options)  # what is imported late is imported
    points = sorted(lines(lambda: warploom.patch(make(), **options), files))
    for point in points[:: 1 if case == "plain" else 2]:  # of others, many are the same
        patched = make()
        before = state(patched)
        with pytest.raises(KeyboardInterrupt):
            lines(partial(warploom.patch, patched, **options), files, point)
        assert state(patched) == before, point
        assert torch.is_grad_enabled(), point
        with warploom.patch(patched):
            assert state(patched) != before
        assert state(patched) == before, point


def test_an_interrupt_while_a_patch_is_undone_is_told_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is impatient and presses Ctrl-C again has the model as it was, too."""
    patched = llama()
    before = state(patched)
    removing, removals = unpacked.unhook, []

    def interrupted(module: torch.nn.Module) -> None:
        removals.append(module)
        if len(removals) == 1:
            raise KeyboardInterrupt("the second")
        removing(module)

    def failing(module: torch.nn.Module) -> None:
        raise ValueError("the first")

    monkeypatch.setattr(unpacked, "unhook", interrupted)
    monkeypatch.setattr(unpacked, "hook", failing)
    with pytest.raises(KeyboardInterrupt, match="the second"):
        warploom.patch(patched)
    assert len(removals) == 2
    assert state(patched) == before


@pytest.mark.parametrize("case", ["plain", "llama"])
def test_an_interrupted_undo_is_finished_by_another(case: str) -> None:
    make, _ = MODELS[case]
    files = ("patch", "unpacked")
    for point in sorted(lines(warploom.patch(make()).undo, files)):
        patched = make()
        before = state(patched)
        patch = warploom.patch(patched)
        with pytest.raises(KeyboardInterrupt):
            lines(patch.undo, files, point)
        patch.undo()
        assert state(patched) == before, point
        warploom.patch(patched).undo()
        assert state(patched) == before, point
