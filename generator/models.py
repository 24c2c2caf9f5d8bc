"""The config.json of a Llama-like model of transformers: its linear layers and its heads.

Any model of that kind is described by the same fields, whatever its name. One that is not is
refused, with what it has too much or too little; `warploom.recording` serves all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from warploom.errors import ConfigurationError
from warploom.generator import json_file
from warploom.generator.shapes import LARGEST

FILE = "config.json"
Element = Literal["bf16", "fp16"]
ELEMENTS: dict[str, Element] = {"bfloat16": "bf16", "float16": "fp16"}
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_NORMS = ("rms_norm_eps",)  # of a Llama, and of no model whose MLP has no gate
_GATED = {"cohere", "cohere2", "olmo", "stablelm"}  # Llama-like but for their norm
_BIASED = "qwen2"  # of q, k and v have a bias that no file tells: qwen2, qwen2_5_vl_text
_BIASES = ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias")
_TYPES = ("torch_dtype", "dtype")  # as transformers calls it before and since its version 5
_FURTHER = {  # fields of layers that a Llama has not
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "moe_num_experts": "experts",
    "kv_lora_rank": "latent attention (MLA)",
    "quantization_config": "quantized weights",
    "is_encoder_decoder": "an encoder",
    "cross_attention_layers": "cross attention",
}
_MEND = "give the config.json that the model came with"
_FIX = "record its calls with warploom.recording, and compile that file"


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer: its weight [n, k], and whether it has a bias."""

    n: int
    k: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides its kernels.

    element   of weights and activations, in 16 bits
    layers    each weight once: fused, as engines have them, and one by one, as transformers has
    window    keys that layers with a sliding window see; 0: there are none
    softcap   whether scores of attention are capped
    """

    element: Element
    layers: tuple[Layer, ...]
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    softcap: bool = False

    def weights(self, *, biased: bool = False) -> list[tuple[int, int]]:
        """The extents [n, k] of every weight, each once; of `biased`, of layers with a bias."""
        found = ((layer.n, layer.k) for layer in self.layers if layer.bias or not biased)
        return list(dict.fromkeys(found))


def is_path(model: str) -> bool:
    """Whether --model is the path of a configuration, and no name of benchmarks/cells.yaml."""
    return model.endswith(".json") or "/" in model or (model != "" and Path(model).is_dir())


@cache
def read(model: str) -> Model:
    """Return the model of a config.json, or of a directory that has one.

    Raises:
        ConfigurationError: There is no such file, or it is of no Llama-like model; it names the
            field.
    """
    path = Path(model)
    path = path / FILE if path.is_dir() else path
    try:
        fields = json_file.parse(json_file.content(path))
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {json_file.reason(error)}",
            rule=f"must be the {FILE} of a model, or a directory that has it",
            fix="give the path of a file that is here, or a model of benchmarks/cells.yaml",
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}", rule="must be JSON", fix=_MEND) from error
    if not isinstance(fields, dict):
        raise ConfigurationError(
            f"{path}: {type(fields).__name__}", rule="must be a JSON object", fix=_MEND
        )
    nested = fields.get("text_config")  # of a model that sees, too
    if isinstance(nested, dict) and any(name not in fields for name in _REQUIRED):
        fields = _merged(fields, nested)
    return _Reader(path, fields).model()


def _merged(fields: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model that sees, over which go those that its language model tells."""
    told = {name: value for name, value in nested.items() if value is not None}
    kept = {n: v for n, v in fields.items() if n not in _TYPES or not told.keys() & {*_TYPES}}
    return {**kept, **told}


class _Reader:
    """The fields of one file."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path, self.fields = path, fields
        self.kind = str(fields.get("model_type", ""))

    def model(self) -> Model:
        self._require_llama_like()
        heads = self._count("num_attention_heads")
        hidden = self._count("hidden_size")
        kv_heads = self._count("num_key_value_heads", heads)
        if heads % kv_heads:
            self._refuse("num_key_value_heads", f"must divide num_attention_heads, {heads}")
        dim = self._count("head_dim", hidden // heads)
        if "head_dim" not in self.fields and hidden % heads:
            self._refuse("num_attention_heads", f"must divide hidden_size, {hidden}")
        layers = dict.fromkeys(self._layers(hidden, heads * dim, kv_heads * dim))
        softcap = bool(self.fields.get("attn_logit_softcapping"))
        return Model(self._element(), tuple(layers), heads, kv_heads, dim, self._window(), softcap)

    def _layers(self, hidden: int, queries: int, keys: int) -> Iterator[Layer]:
        inner = self._count("intermediate_size")
        told = any(self.fields.get(name) for name in _BIASES)
        biased = told or self.kind.startswith(_BIASED)
        gated = bool(self.fields.get("mlp_bias") or self.fields.get("use_bias"))
        for n in (queries + 2 * keys, queries, keys):
            yield Layer(n, hidden, biased)
        yield Layer(hidden, queries, told)
        for n in (2 * inner, inner):
            yield Layer(n, hidden, gated)
        yield Layer(hidden, inner, gated)
        yield Layer(self._count("vocab_size"), hidden)

    def _require_llama_like(self) -> None:
        if missing := [name for name in _REQUIRED if self.fields.get(name) is None]:
            self._unlike(f"without {', '.join(missing)}")
        for name, what in _FURTHER.items():
            if self.fields.get(name):
                self._unlike(f"with {name}: it has {what}")
        if other := sorted(name for name in self.fields if name.startswith(("mamba_", "ssm_"))):
            self._unlike(f"with {other[0]}: it has layers of another kind")
        kinds = self.fields.get("layer_types") or []
        known = {"full_attention", "sliding_attention"}
        if not isinstance(kinds, list) or (strange := {*map(str, kinds)} - known):
            told = sorted(strange)[0] if isinstance(kinds, list) else kinds
            self._unlike(f"with layer_types of {told!r}")
        if self.kind not in _GATED and not any(name in self.fields for name in _NORMS):
            self._unlike("without rms_norm_eps, so that its MLP may have no gate")

    def _element(self) -> Element:
        """The type of its weights; engines load what says nothing in bf16."""
        field = next((one for one in _TYPES if self.fields.get(one)), _TYPES[0])
        name = str(self.fields.get(field) or "bfloat16").removeprefix("torch.")
        if name not in ELEMENTS:
            raise ConfigurationError(
                f"{self.path}: {field} {name}",
                rule=f"must be {' or '.join(ELEMENTS)}: kernels are of 16 bits",
                fix="write the one that the model is loaded in into a copy of the file",
            )
        return ELEMENTS[name]

    def _window(self) -> int:
        """The width of a sliding window, where some layer uses one."""
        if self.fields.get("sliding_window") is None:
            return 0
        kinds = self.fields.get("layer_types")
        if kinds and "sliding_attention" not in kinds:
            return 0
        return self._count("sliding_window") if self.fields.get("use_sliding_window", True) else 0

    def _count(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= LARGEST:
            self._refuse(name, "must be a positive integer of 32 bits")
        return value

    def _refuse(self, name: str, rule: str) -> NoReturn:
        raise ConfigurationError(
            f"{self.path}: {name} {self.fields.get(name)!r}", rule=rule, fix="mend the file"
        )

    def _unlike(self, how: str) -> NoReturn:
        kind = f"model_type {self.kind!r}" if self.kind else "a model"
        raise ConfigurationError(
            f"{self.path}: {kind} {how}",
            rule="must be Llama-like: attention and a gated MLP of dense layers in 16 bits",
            fix=_FIX,
        )
