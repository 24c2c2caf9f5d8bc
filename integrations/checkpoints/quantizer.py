"""`warploom.WarploomConfig` and its quantizer: transformers quantizes layers as they load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

import torch

from warploom.errors import ProblemError
from warploom.integrations.checkpoints.experts import PARTS, QuantizedExperts
from warploom.integrations.checkpoints.records import Record, place, records
from warploom.integrations.patch_weights import Asked, Weights, choose_linear
from warploom.integrations.quantized_linear import READ, QuantizedLinear

if find_spec("transformers") is None:
    raise ProblemError(
        "transformers is not installed",
        rule="it is what loads a model with a WarploomConfig",
        fix="pip install 'warploom[transformers]'",
    )

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "warploom"  # quant_method of config.json
_ABSENT = object()


@register_quantization_config(METHOD)
class WarploomConfig(QuantizationConfigMixin):
    """How `from_pretrained(path, quantization_config=...)` quantizes a model's linear layers.

    A layer is quantized when its weight has been read, before the next one is: memory holds the
    quantized model and one weight. `save_pretrained` writes quantized weights and this
    configuration, and `from_pretrained` of that folder gives the same bits back, on a CPU or a GPU;
    a new process calls `warploom.register_transformers()` first, or names this class.

    Example:
        >>> config = WarploomConfig("int4", group_size=128)
        >>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
        >>> model.save_pretrained("quantized")
    """

    def __init__(
        self,
        format: str = "int4",
        group_size: int | Literal["auto"] | None = "auto",
        *,
        symmetric: bool | None = None,
        scale_dtype: torch.dtype | str | None = None,
        skip: Sequence[str] | None = None,
        layers: list[Record] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        """Check the options.

        Args:
            format: A format of `warploom.quantize`: int4, uint4, int8, e4m3, mxfp4, nvfp4, ...
            group_size: How many values along K share a scale, None for one scale a row, "auto" for
                the format's own.
            symmetric: False for zero points, which only uint4 has.
            scale_dtype: The type of scales, or its name ("float16"); the format's own if not given.
            skip: Names of modules or patterns, as `*.down_proj`, whose layers stay as they are. The
                output head if not given.
            layers: Written by `save_pretrained`: which layers are quantized, and how.
            quant_method: Written by `save_pretrained`: "warploom".

        Raises:
            ProblemError: for options that no weight could be quantized by.
        """
        if quant_method != METHOD:
            raise ProblemError(f"quant_method {quant_method!r}", rule=f"must be {METHOD!r}")
        self.quant_method: Any = METHOD
        self.format = format
        self.group_size = group_size
        self.symmetric = symmetric
        self.scale_dtype = _name(scale_dtype)
        self.skip: Any = list(skip) if isinstance(skip, tuple | set | frozenset) else skip
        self.layers = layers
        self.asked()

    def asked(self) -> Asked:
        """Return the options as `warploom.patch(model, weights=...)` takes them."""
        options: Weights = {
            "format": self.format,
            "group": self.group_size,
            "symmetric": self.symmetric,
            "scale_dtype": None if self.scale_dtype is None else getattr(torch, self.scale_dtype),
        }
        if self.skip is not None:
            options["skip"] = self.skip  # what is no list is refused by name
        return Asked(options)

    @staticmethod
    @contextmanager
    def described(model: Any) -> Iterator[None]:  # noqa: ANN401 (a PreTrainedModel)
        """Let a model's configuration say which of its layers are quantized, while it is saved."""
        config = WarploomConfig(layers=records(model))
        had = model.config.__dict__.get("quantization_config")
        if isinstance(had, WarploomConfig):
            options = {key: one for key, one in had.to_dict().items() if key != "layers"}
            config = WarploomConfig(**options, layers=config.layers)
        quantizer = getattr(model, "hf_quantizer", None)
        conversions = _conversions(model)
        names = vars(model)
        had_conversions = names.get("_weight_conversions", _ABSENT)
        if conversions is not None:
            model._weight_conversions = conversions
        model.config.quantization_config = config
        model.hf_quantizer = WarploomQuantizer(config, pre_quantized=True)
        try:
            yield
        finally:
            if conversions is not None:
                if had_conversions is _ABSENT:
                    del model._weight_conversions
                else:
                    model._weight_conversions = had_conversions
            if quantizer is None:
                del model.hf_quantizer
            else:
                model.hf_quantizer = quantizer
            if had is None:
                del model.config.quantization_config
            else:
                model.config.quantization_config = had


def _name(dtype: torch.dtype | str | None) -> str | None:
    """The name of a type, which JSON can have."""
    name = str(dtype).removeprefix("torch.") if dtype is not None else None
    if name is not None and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ProblemError(f"scale_dtype {dtype!r}", rule="must be a dtype of torch, or its name")
    return name


@register_quantizer(METHOD)
class WarploomQuantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizes linear layers while transformers loads them, or makes layers to be filled."""

    quantization_config: WarploomConfig

    def __init__(self, quantization_config: WarploomConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._chosen: set[str] = set()

    @property
    def quantized_element_size(self) -> float:
        """Bytes for each weight, by which a `device_map="auto"` is planned."""
        metadata = self.quantization_config.asked().metadata((1 << 10, 1 << 10))
        return metadata.nbytes / (1 << 20)

    @property
    def is_trainable(self) -> bool:
        """True: adapters train on quantized layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: quantized layers are traced like others."""
        return True

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` writes quantized weights."""
        return True

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:  # noqa: ANN401
        """Return whether a parameter is the weight of a layer that is to be quantized."""
        layer, _, name = param_name.rpartition(".")
        return not self.pre_quantized and name == "weight" and layer in self._chosen

    def get_quantize_ops(self) -> Quantize:
        """Return what transformers calls with each weight that is to be quantized."""
        return Quantize(self)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Choose the layers, or make quantized ones to be filled; the model is on `meta`."""
        if self.pre_quantized:
            if self.quantization_config.layers is None:
                raise ProblemError(
                    "a quantization_config of warploom without layers",
                    rule="must be what save_pretrained wrote",
                    fix="save the model again",
                )
            place(model, self.quantization_config.layers)
            return
        keep = {*(kwargs.get("keep_in_fp32_modules") or ())}
        tied = getattr(model, "all_tied_weights_keys", {})
        shared = {*tied, *tied.values()}
        chosen, left = choose_linear(model, self.quantization_config.asked())
        self._chosen = {
            name
            for name in chosen.values()
            if f"{name}.weight" not in shared and keep.isdisjoint(name.split("."))
        }
        if not self._chosen:
            why = next(iter(left.values()), "there is no torch.nn.Linear")
            raise ProblemError(
                f"{type(model).__name__} with {self.quantization_config.format} in groups of "
                f"{self.quantization_config.group_size}: no layer can be quantized",
                rule=f"at least one must be: {why}",
                fix="choose a group_size that divides the layers' in_features, or None",
            )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Record what was quantized, so that the model's configuration says it.

        Raises ProblemError for a weight that the checkpoint lacks: transformers only warns of it. A
        bias that a checkpoint of 16 or 32 bits lacks is 0, as transformers makes those of others.
        """
        if self.pre_quantized:
            _check_read(model)
        else:
            _zero_unread_biases(model)
        self.quantization_config.layers = records(model)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:  # noqa: ANN401
        """Give linear layers back, in 16 or 32 bits, in place."""
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantizedLinear):
                model.set_submodule(name, _plain(module, dtype or module.dtype))
        return model


def _check_read(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            parts = [*module.metadata.tensors(), *["bias"] * (module.bias is not None)]
            for part in parts:
                if not getattr(module.get_parameter(part), READ, False):
                    raise ProblemError(
                        f"{name}.{part} is not in the checkpoint",
                        rule="must be there: config.json lists the layer as quantized",
                        fix="save the model again, or download the checkpoint again",
                    )


def _zero_unread_biases(model: torch.nn.Module) -> None:
    """Fill biases that transformers left as memory that nothing wrote to: it takes quantized
    layers for filled.
    """
    for module in model.modules():
        bias = module.bias if isinstance(module, QuantizedLinear) else None
        if bias is not None and not getattr(bias, READ, False):
            torch.nn.init.zeros_(bias)


def _plain(module: QuantizedLinear, dtype: torch.dtype) -> torch.nn.Linear:
    made = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    made.weight = torch.nn.Parameter(module.weight.dequantize(dtype))
    if module.bias is not None:
        made.bias = torch.nn.Parameter(module.bias.detach().to(dtype))
    return made.train(module.training)


class Quantize(ConversionOps):
    """Puts a quantized layer in the place of one whose weight has been read."""

    def __init__(self, quantizer: WarploomQuantizer) -> None:
        self._quantizer = quantizer

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        *,
        model: Any,  # noqa: ANN401
        full_layer_name: str,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Quantize the weight, and return nothing for transformers to set."""
        (given,) = input_dict.values()
        weight = given[0] if isinstance(given, list) else given
        name = full_layer_name.removesuffix(".weight")
        linear = model.get_submodule(name)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        if linear.bias is not None and linear.bias.is_meta:  # it is read later, or not at all
            zeros = torch.zeros(linear.out_features, dtype=weight.dtype, device=weight.device)
            linear.bias = torch.nn.Parameter(zeros)
        model.set_submodule(name, self._quantizer.quantization_config.asked().layer(linear))
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


def _conversions(model: Any) -> list[Any] | None:  # noqa: ANN401 (a PreTrainedModel)
    """How names of a model with quantized experts become those of its checkpoint; else None.

    Most mixtures have experts one by one in checkpoints, which transformers merges as it loads and
    splits as it saves. It would split the quantized weights of each expert, too: conversions of the
    experts' weights are left out, so that these keep their names, as they are when they are loaded.
    """
    if not any(isinstance(module, QuantizedExperts) for module in model.modules()):
        return None
    loaded = getattr(model, "_weight_conversions", None)
    if loaded is None:  # as transformers finds them
        own = get_model_conversion_mapping(model, add_legacy=False)
        loaded = [one for one in own if not isinstance(one, PrefixChange)]
    return [
        one
        for one in loaded
        if not isinstance(one, WeightConverter)
        or not any(pattern.endswith(PARTS) for pattern in one.target_patterns)
    ]
