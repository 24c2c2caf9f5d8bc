"""`warploom.load_checkpoint`: whole models that others quantized, layer by layer."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, cast, overload

import torch
from rich.console import Console
from rich.progress import track

from warploom.errors import ProblemError
from warploom.integrations.checkpoints.experts import CLASS, PARTS, QuantizedExperts
from warploom.integrations.checkpoints.layers import IGNORED, Layers
from warploom.integrations.checkpoints.mixtures import EXPERT, Mixture, is_joined, one_of, unlike
from warploom.integrations.checkpoints.shards import Shards
from warploom.integrations.linear import Linear
from warploom.integrations.linear_sharing import check_unwrapped
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.printable import brief, cut
from warploom.suggestions import suggestion

METHODS = (
    *("awq", "gptq", "auto-round", "intel/auto-round"),
    *("compressed-tensors", "fp8", "mxfp4", "modelopt"),
)
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@overload
def load_checkpoint(
    model: str | os.PathLike[str],
    path: None = None,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    requantize: str | None = None,
    progress: bool = True,
    **options: Any,
) -> Any: ...  # noqa: ANN401
@overload
def load_checkpoint(
    model: ModuleT,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    requantize: str | None = None,
    progress: bool = True,
) -> ModuleT: ...
@torch.no_grad()
def load_checkpoint(
    model: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    requantize: str | None = None,
    progress: bool = True,
    **options: Any,
) -> Any:
    """Load a model that AutoAWQ, GPTQModel, auto-round, llm-compressor or others quantized.

    Each quantized layer becomes a `warploom.nn.QuantizedLinear` of the same weight, number for
    number, for activations of 16 bits; experts become such layers, too. Experts whose gate has no
    kernel, or whose gate and up differ in format, are dequantized to the model's dtype. Files are
    read layer by layer, so that memory holds the model and one layer. `save_pretrained` of the
    model writes a checkpoint that `from_pretrained` loads.

    Args:
        model: The checkpoint's folder, for the model of transformers that its config.json names; or
            a module, best one on `meta`, whose layers have the names of the checkpoint's tensors.
        path: The checkpoint's folder, where `model` is a module.
        device: Where the model is to be, if not where it is; the CPU for one on `meta`.
        dtype: The dtype of all that is not quantized; by default that of the model. What a model of
            transformers keeps in fp32, as biases of routers, is fp32.
        requantize: A format into which weights are quantized again that kernels do not read as they
            are, as for `import_weight`; by default these raise an error.
        progress: Whether a progress bar is shown, if stderr is a terminal.
        options: Keywords of `AutoModelForCausalLM.from_config`, such as
            attn_implementation="warploom".

    Returns:
        The model, in evaluation mode where it was made here.

    Raises:
        ProblemError: for a checkpoint that is not quantized or by a method that is not read, for
            what `import_weight` refuses (act-order, other bits), for tensors that are missing, of
            another shape, or that the model has no place for. A module is unchanged then.

    Example:
        >>> model = warploom.load_checkpoint("Qwen3-8B-AWQ", device="cuda")
    """
    module = model if isinstance(model, torch.nn.Module) else None
    folder = path if module is not None else model
    if not isinstance(folder, str | os.PathLike):
        raise ProblemError(
            f"path {brief(folder)}",
            rule="must be the folder of a checkpoint",
            fix="load_checkpoint(folder), or load_checkpoint(model, folder)",
        )
    if (module is None) is (path is not None):
        raise ProblemError(
            f"model {brief(model)} and path {brief(path)}",
            rule="must be one folder, or a torch.nn.Module and a folder",
            fix="load_checkpoint(folder), or load_checkpoint(model, folder)",
        )
    if module is not None and options:
        raise ProblemError(
            f"{', '.join(options)} for a model that is made already",
            rule="must be passed to the call that makes the model",
            fix="load_checkpoint(folder, ...)",
        )
    with Shards(folder) as shards:
        settings = _settings(shards)
        whole = module if module is not None else _made(shards, dtype, options)
        found = _Found(whole, shards, settings, device, dtype, requantize)
        found.read(progress)
    found.put()
    if module is None:
        whole.eval()
    return whole


def _settings(shards: Shards) -> Mapping[str, Any]:
    """The quantization_config of config.json, whose method is one that is read."""
    config = shards.config
    text = config.get("text_config")
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is None and isinstance(text, dict):
        settings = text.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    where = f"{shards.folder / 'config.json'}: "
    if settings is None:
        raise ProblemError(
            f"{where}no quantization_config",
            rule="must be that of a quantized checkpoint",
            fix="from_pretrained(path, quantization_config=warploom.WarploomConfig(...))",
        )
    if method == "warploom":
        raise ProblemError(
            f"{where}quant_method 'warploom'",
            rule="must be another's",
            fix="call warploom.register_transformers(); from_pretrained(path) loads it then",
        )
    if method not in METHODS:
        near = suggestion(method[:80], METHODS) if isinstance(method, str) else ""
        fix = "import_weight reads single layers of torchao's and BitNet's"
        raise ProblemError(
            f"{where}quant_method {brief(method)}",
            rule=f"must be one of {', '.join(METHODS)}",
            fix=near or fix,
        )
    return cast("Mapping[str, Any]", settings)


def _made(shards: Shards, dtype: torch.dtype | None, options: dict[str, Any]) -> torch.nn.Module:
    """The model that config.json names, on `meta`."""
    from warploom.integrations.patch_attention import register_transformers

    register_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(shards.folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind = dtype or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        classes: Any = AutoModelForCausalLM
        made: Any = classes.from_config(config, dtype=kind, **options)
    if (shards.folder / "generation_config.json").is_file():
        made.generation_config = GenerationConfig.from_pretrained(shards.folder)
    return cast("torch.nn.Module", made)


class _Found:
    """What is read for a model, before anything of it is put there."""

    def __init__(
        self,
        model: torch.nn.Module,
        shards: Shards,
        settings: Mapping[str, Any],
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        requantize: str | None,
    ) -> None:
        self._model: Any = model
        self._shards = shards
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._modules: dict[str, torch.nn.Module] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}  # by modules' names
        if not any(name.endswith("block_sparse_moe") for name, _ in model.named_modules()):
            shards.rename(".block_sparse_moe.", ".mlp.")  # Mixtral's, as transformers has it
        self._layers = Layers(shards, settings, requantize)
        self._left = set(shards)

    # ---- Reading ---------------------------------------------------------------------------------

    def read(self, progress: bool) -> None:
        """Read all that the model has a place for; ProblemError where it does not fit."""
        steps = list(self._steps())
        console = Console(stderr=True)
        quiet = not (progress and console.is_terminal)
        name = self._shards.folder.name
        for step in track(steps, f"Loading {name}", console=console, disable=quiet):
            step()
        self._check_missing()
        self._check_left()
        self._compute_buffers()

    def _steps(self) -> Iterator[Callable[[], None]]:
        """What there is to do for each module."""
        experts: dict[str, list[str]] = {}
        for layer in self._layers.keys:
            if match := EXPERT.fullmatch(layer):
                experts.setdefault(match[1], []).append(layer)
        for name, module in self._model.named_modules():
            keys = self._layers.keys.get(name, [])
            if is_joined(module) and name in experts:
                yield partial(self._mixture, name, module, experts[name])
            elif type(module).__name__ == CLASS and f"{name}.{PARTS[0]}_blocks" in keys:
                yield partial(self._experts, name, module, keys)
            elif type(module) in (torch.nn.Linear, Linear) and self._layers.is_quantized(name):
                yield partial(self._layer, name, cast("torch.nn.Linear", module), keys)
            elif isinstance(module, QuantizedLinear) and keys:
                raise ProblemError(
                    f"{name}: a quantized layer in the model",
                    rule="must be a torch.nn.Linear, which the checkpoint's layer replaces",
                    fix="make the model anew, without quantizing it",
                )
            else:
                yield partial(self._plain, name, module)

    def _layer(self, name: str, linear: torch.nn.Linear, keys: list[str]) -> None:
        check_unwrapped(linear)
        device, dtype = self._place(linear.weight)
        tensors, bias = self._layers.read(name, device)
        weight = self._layers.weight(tensors, name)
        if weight.shape != tuple(linear.weight.shape):
            raise unlike(name, weight.shape, linear.weight.shape)
        self._left.difference_update(keys)
        if bias is not None and linear.bias is None and not bool(bias.any()):
            bias = None  # AutoGPTQ writes biases of 0 for layers that have none
        if bias is None and linear.bias is not None:
            raise ProblemError(
                f"{name}.bias is not in {self._shards.folder}",
                rule="must be: the model's layer has a bias",
                fix="download the checkpoint again, or make the model of its config.json",
            )
        made = QuantizedLinear.in_place_of(linear, weight, None if bias is None else bias.to(dtype))
        made.dtype = dtype
        if made.bias is not None:
            made.bias.requires_grad_(linear.bias is not None and linear.bias.requires_grad)
        self._modules[name] = made

    def _experts(self, name: str, module: Any, keys: list[str]) -> None:  # noqa: ANN401
        """GPT-OSS's: `_blocks`, `_scales` and `_bias` of gate_up_proj and down_proj."""
        layers = []
        for part in PARTS:
            device, dtype = self._place(getattr(module, part))
            wanted = [f"{name}.{part}_{one}" for one in ("blocks", "scales", "bias")]
            if missing := [one for one in wanted if one not in keys]:
                raise self._missing(missing)
            blocks, scales, bias = (self._shards[one].to(device) for one in wanted)
            count, k, n = getattr(module, part).shape
            if tuple(bias.shape) != (count, n):
                raise unlike(wanted[2], bias.shape, (count, n))
            made = []
            for expert in range(count):
                both = {"blocks": blocks, "scales": scales}
                weight = self._layers.weight(both, f"{name}.{part}", expert)
                if weight.shape != (n, k) or len(blocks) != count:
                    raise unlike(f"{name}.{part}", (len(blocks), *weight.shape), (count, n, k))
                made.append(one_of(module, part, weight, bias[expert], dtype))
            layers.append(made)
            self._left.difference_update(wanted)
        self._modules[name] = QuantizedExperts.in_place_of(module, *layers)

    def _mixture(self, name: str, module: torch.nn.Module, given: list[str]) -> None:
        """Experts that the checkpoint has one by one: Qwen's, Mixtral's and others'."""
        made = Mixture(name, module, given, self._layers, self._place).read()
        if isinstance(made, QuantizedExperts):
            self._modules[name] = made
        else:
            self._tensors |= made
        for layer in given:
            self._left.difference_update(self._layers.keys[layer])
        self._left.difference_update(f"{name}.{part}_scale_inv" for part in PARTS)

    def _plain(self, name: str, module: torch.nn.Module) -> None:
        """Parameters and buffers that are not quantized."""
        kept = {**module._parameters, **module._buffers}
        for own, tensor in kept.items():
            key = f"{name}.{own}" if name else own
            if tensor is None or key not in self._shards:
                continue
            given = self._shards[key]
            if given.shape != tensor.shape:
                raise unlike(key, given.shape, tensor.shape)
            if given.dtype != tensor.dtype and not (
                given.dtype in _FLOATS and tensor.is_floating_point()
            ):
                raise ProblemError(
                    f"{key} of {given.dtype} in {self._shards.folder}",
                    rule=f"must be {tensor.dtype}, or quantized in a torch.nn.Linear",
                    fix="quantized layers of other kinds are not read yet",
                )
            device, dtype = self._place(tensor)
            if tensor.is_floating_point() and self._is_kept_in_fp32(key, dtype):
                dtype = torch.float32
            self._tensors[key] = given.to(device, dtype)
            self._left.discard(key)

    def _place(self, tensor: torch.Tensor) -> tuple[torch.device, torch.dtype]:
        """Where a tensor in the place of this one is to be, and of what type."""
        device = self._device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        kept = self._dtype is None or not tensor.is_floating_point()
        return device, tensor.dtype if kept else cast("torch.dtype", self._dtype)

    def _is_kept_in_fp32(self, key: str, dtype: torch.dtype) -> bool:
        """Whether a model of transformers has a tensor in fp32 whatever its own dtype is."""
        lists = ["_keep_in_fp32_modules_strict"]
        lists += ["_keep_in_fp32_modules"] * (dtype == torch.float16)
        names = (name for one in lists for name in getattr(self._model, one, None) or ())
        return any(f".{name}." in f".{key}." for name in names)

    # ---- What does not fit -----------------------------------------------------------------------

    def _check_missing(self) -> None:
        """Raise for what the model has, and neither the checkpoint nor a tied parameter gives."""
        tied = getattr(self._model, "all_tied_weights_keys", {})
        here = {*self._tensors}
        here |= {name for name in (*tied, *tied.values()) if tied.get(name, name) in here}
        here |= {one for one, other in tied.items() if one in here or other in here}
        given = self._model.named_parameters(remove_duplicate=False)
        shared = {id(one) for name, one in given if name in here}
        state = self._model.state_dict(keep_vars=True)
        inside = tuple(f"{name}." for name in self._modules)
        missing = [
            name
            for name, one in state.items()
            if name not in here
            and id(one) not in shared
            and not name.startswith(inside)
            and not name.endswith("_extra_state")
        ]
        if missing:
            raise self._missing(missing)

    def _missing(self, names: list[str]) -> ProblemError:
        return ProblemError(
            f"{cut(', '.join(names), 200)} not in {self._shards.folder}",
            rule="must be in the checkpoint: the model has a parameter or buffer of that name",
            fix="download the checkpoint again, or make the model of its config.json",
        )

    def _check_left(self) -> None:
        ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        left = sorted(
            name
            for name in self._left
            if not IGNORED.search(name) and not any(re.search(one, name) for one in ignored)
        )
        if not left:
            return
        experts = any(EXPERT.search(name) for name in left)
        raise ProblemError(
            f"{cut(', '.join(left), 200)} in {self._shards.folder}",
            rule="must be a parameter, a buffer or a quantized layer of "
            f"{type(self._model).__name__}",
            fix="mixtures of experts are read into layers with gate_up_proj and down_proj of all"
            if experts
            else "make the model from the checkpoint's config.json, which has these layers",
        )

    # ---- Putting ---------------------------------------------------------------------------------

    def put(self) -> None:
        """Put all that was read into the model."""
        model = self._model
        shared: dict[int, list[str]] = {}
        for name, one in model.named_parameters(remove_duplicate=False):
            shared.setdefault(id(one), []).append(name)
        for name, tensor in self._tensors.items():
            owner, _, own = name.rpartition(".")
            module = model.get_submodule(owner)
            if own in module._buffers:
                module._buffers[own] = tensor
                continue
            old = module._parameters[own]
            trains = old.requires_grad and tensor.is_floating_point()
            made = torch.nn.Parameter(tensor, requires_grad=trains)
            for alias in shared.get(id(old), [name]):
                place, _, last = alias.rpartition(".")
                model.get_submodule(place)._parameters[last] = made
        for name, module in self._modules.items():
            model.set_submodule(name, module)
        if callable(tie := getattr(model, "tie_weights", None)):
            tie()
        for name, module in model.named_modules():
            module._buffers.update(self._buffers.get(name, {}))
            if self._device is not None:
                for own, one in module._buffers.items():
                    module._buffers[own] = None if one is None else one.to(self._device)

    def _compute_buffers(self) -> None:
        """Compute what no checkpoint has: rotary frequencies, which transformers initializes."""
        replaced = tuple(f"{name}." for name in self._modules)
        for name, module in self._model.named_modules():
            empty = {
                own: one
                for own, one in module._buffers.items()
                if one is not None
                and one.is_meta
                and f"{name}.{own}".strip(".") not in self._tensors
            }
            if not empty or f"{name}.".startswith(replaced):
                continue
            initialize = getattr(self._model, "_init_weights", None)
            if not callable(initialize):
                raise _unknown(name, empty)
            # What is as it was filled, both times, was not computed.
            first, second = (self._initialized(initialize, module, empty, one) for one in (0, 1))
            unset = [own for own in empty if bool(((first[own] == 0) & (second[own] == 1)).any())]
            if unset:
                raise _unknown(name, unset)
            self._buffers[name] = first

    def _initialized(
        self,
        initialize: Callable[[torch.nn.Module], object],
        module: torch.nn.Module,
        empty: Mapping[str, torch.Tensor],
        fill: int,
    ) -> dict[str, torch.Tensor]:
        """These buffers of a module, filled with a number and then initialized: of a copy of it, as
        `initialize` draws its parameters anew.
        """
        twin = copy.copy(module)
        twin._parameters = {
            own: None if one is None else torch.nn.Parameter(one.to("meta"), one.requires_grad)
            for own, one in module._parameters.items()
        }
        twin._buffers = {
            own: one if one is None else torch.full_like(one, fill, device=self._device or "cpu")
            for own, one in module._buffers.items()
        }
        initialize(twin)
        return {own: cast("torch.Tensor", twin._buffers[own]) for own in empty}


def _unknown(name: str, buffers: Any) -> ProblemError:  # noqa: ANN401
    return ProblemError(
        f"{name}: the buffers {', '.join(buffers)} on meta",
        rule="must be in memory, or such that the model's _init_weights computes them",
        fix="make the model on the CPU",
    )
