"""States of layers with packed weights: tensors, one of which says what the others are.

That one is the metadata as JSON, in bytes: so a state is tensors alone, which safetensors and
torch's distributed checkpoints take too. The weight in a state is taken whole or refused, before
anything of the layer is written to; a state without one, as of biases alone, leaves it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from warploom.errors import ProblemError
from warploom.quantization import Metadata, PackedWeight
from warploom.quantization.packed_weight import NAMES
from warploom.runtime.tensors import shown

KEY = "_extra_state"  # torch's name for what a module has in its state beside parameters


def encoded(metadata: Metadata) -> torch.Tensor:
    """The metadata as bytes, on the CPU: uint8 [length]."""
    text = json.dumps(metadata.as_dict(), sort_keys=True)
    return torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")


def decoded(state: object) -> Metadata:
    """Read what `encoded` gave. ProblemError for anything else, and for another version."""
    try:
        found = json.loads(bytes(state.tolist()))  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError) as error:
        raise ProblemError(
            f"{KEY} {shown(state)}",
            rule="must be the metadata of a quantized weight, as state_dict() has it",
            fix="save the state again",
        ) from error
    return Metadata.from_dict(found)


def check_state(given: Mapping[str, object], metadata: Metadata, bias: torch.Tensor | None) -> None:
    """Raise ProblemError for the state of another layer than one of this weight and bias.

    `given` has the entries of the layer by their names in it. It has all of the weight or nothing
    of it: a weight is never made of an old part and a new one. Of a bias torch tells.
    """
    if "weight" in given:
        raise ProblemError(
            f"weight {shown(given['weight'])}",
            rule=f"must be quantized: {', '.join(entries(metadata))}",
            fix="load it into a torch.nn.Linear, and quantize that with from_linear",
        )
    packed = {name: one for name, one in given.items() if name in (*NAMES, KEY)}
    if KEY in packed:
        check_kind(packed[KEY], metadata)
    missing = [name for name in entries(metadata) if name not in packed]
    if packed and missing:
        raise ProblemError(
            f"{', '.join(packed)} without {', '.join(missing)}",
            rule=f"must have all of {', '.join(entries(metadata))}, or none",
            fix="save all of state_dict()",
        )
    if packed:
        tensors = {name: one for name, one in packed.items() if name != KEY}
        PackedWeight.from_tensors(tensors, metadata)  # type: ignore[arg-type]
    has, wants = (getattr(one, "shape", None) for one in (given.get("bias"), bias))
    if "bias" in given and bias is not None and has != wants:
        raise ProblemError(
            f"bias {shown(given['bias']) if has is None else list(has)}",
            rule=f"must be {list(bias.shape)}, as the layer's",
        )


def check_kind(state: object, metadata: Metadata) -> None:
    """Raise ProblemError for the entry KEY of a state, where it is of another kind of weight."""
    found = decoded(state)
    if found != metadata:
        raise ProblemError(
            f"a weight of {found}",
            rule=f"must be of {metadata}, as the layer's",
            fix="make a layer of that kind: its arguments are named so",
        )


def entries(metadata: Metadata) -> tuple[str, ...]:
    """The names of a weight's entries in a state."""
    return (*metadata.tensors(), KEY)
