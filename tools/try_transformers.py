"""Patches tiny models of every kind that transformers has: `try_transformers.py`.

For a new version of transformers: which models lose a mask, a gradient or a bias once they are
patched? Each kind (default: all; or those named) has a process of its own, which compares the model
with the same one unpatched: logits of padded and packed batches, gradients, prompts in two pieces,
tokens that are generated with caches of both kinds, and what `undo` restores. Then quantized
weights, fp8 recipes and attention of 8 bits are tried.

It runs without a GPU. Each call is made twice: in fp32, where torch computes attention by the masks
that models get, and in bf16 with Warploom's reference in place of kernels. There the result of each
attention is compared with torch's of the same operands and mask, row by row.

`--testers FOLDER` tries the classes of models that transformers' own tests make, images and speech
among them. FOLDER is the checkout of transformers whose `tests` these are; KINDS are then folders
of `tests/models`.

Kinds that cannot be made so small are told, with the reason. The exit status is 1 where one failed.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import random
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn.functional import pad

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 128),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("index_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("num_key_value_heads", "index_n_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("sliding_window", "index_topk", "mamba_d_state"), 8),
    **dict.fromkeys(("attention_dropout", "dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "hidden_dropout", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "activation_dropout"), 0.0),
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "linear_num_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a kind has in addition: most are layers of each type that it has.
KINDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
WITHOUT: tuple[tuple[str, ...], ...] = (  # sizes that are left out where a model is none with them
    (),
    ("sliding_window",),
    ("head_dim",),
    ("num_key_value_heads",),
    ("head_dim", "num_key_value_heads"),
    ("sliding_window", "head_dim", "num_key_value_heads", "intermediate_size"),
)
# Of configurations other than those of text, in models that are more than a decoder.
PARTS: dict[str, Any] = {
    **dict.fromkeys(("embed_dim", "out_hidden_size", "projection_dim", "text_hidden_size"), 64),
    **dict.fromkeys(("encoder_layers", "depth", "spatial_merge_size", "temporal_patch_size"), 2),
    **dict.fromkeys(("encoder_attention_heads", "patch_size"), 4),
    **dict.fromkeys(("image_size", "num_mel_bins"), 16),
    **dict.fromkeys(("num_position_embeddings", "max_source_positions"), 64),
    "encoder_ffn_dim": 96,
    "vocab_size_per_layer_input": 128,
    "image_token_id": 120,
    "video_token_id": 121,
    "audio_token_id": 122,
}
LARGEST = 30_000_000  # parameters of a model that is still tiny
ROWS = 12
IDS = torch.randint(3, 100, (2, ROWS), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0
SEEN = MASK.bool()
# Of a row that is padding, the next token is no label: what such rows say is no result.
LABELS = IDS.masked_fill(~SEEN | ~pad(SEEN, (1, 0), value=True)[:, :-1], -100)
_drawn = torch.Generator().manual_seed(1)
_patches = torch.randn(48, 3 * 2 * 4 * 4, generator=_drawn)  # of two images, of 4x4 and 4x8
_grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
_image, _sound = (torch.randn(2, *one, generator=_drawn) for one in ((3, 16, 16), (16, 64)))
# What other models are called with: the first that one takes.
INPUTS: tuple[dict[str, torch.Tensor], ...] = (
    {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
    {"pixel_values": _image},
    {"hidden_states": _patches, "grid_thw": _grid},
    {"pixel_values": _patches, "grid_thw": _grid},
    {"pixel_values": _patches, "image_grid_thw": _grid},
    {"pixel_values": _patches[:, :48], "grid_thw": _grid},
    {"input_ids": IDS, "pixel_values": _image},
    {"input_features": _sound},
    {"input_features": _sound.mT.contiguous()},
    {"input_features": _sound.mT.contiguous(), "attention_mask": torch.ones(2, 64).bool()},
    {"input_features": _sound.mT.contiguous(), "input_features_mask": torch.ones(2, 64).bool()},
    {"input_values": torch.randn(2, 4000, generator=_drawn)},
)
VARIANTS: dict[str, dict[str, Any]] = {
    "int4": {"weights": {"format": "int4", "group": 32}},
    "int8": {"weights": "int8"},
    "blockwise": {"recipe": "blockwise"},
    "rowwise": {"recipe": "rowwise"},
    "8bit": {"attention": "8bit"},
}
GENERATED = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
SECONDS = 600  # for one kind


# ---- One kind, in a process of its own -----------------------------------------------------------


class LeftError(Exception):
    """A kind is not tried, and why."""


def made(kind: str) -> Any:  # noqa: ANN401 (transformers' models are called with anything)
    """A tiny model in bf16, or else fp32, which learns and generates. LeftError: there is none."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise LeftError("it generates no text")
    config_of, reason = CONFIG_MAPPING[kind], ""
    try:
        own = config_of()
    except Exception as error:
        raise LeftError(f"no configuration without arguments: {type(error).__name__}") from error
    known = {name: size for name, size in SIZES.items() if _has(own, name)}
    known |= KINDS.get(kind, {})
    for left in WITHOUT:
        try:
            config = config_of(**{name: size for name, size in known.items() if name not in left})
            with torch.device("meta"):  # one of full size would take all memory
                sketch: Any = AutoModelForCausalLM.from_config(config)
            count = sum(one.numel() for one in sketch.parameters())
            if count > LARGEST:
                reason = f"it has {count} parameters"
                continue
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2 if parameter.dim() > 1 else 1)  # attention then decides more
            try:
                learned(model.bfloat16().eval())
            except RuntimeError:  # some compute in fp32 alone
                learned(model.float())
            model.generate(IDS, attention_mask=MASK, **GENERATED)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        else:
            return model
    raise LeftError(reason)


def made_apart(kind: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model in fp32 that generates nothing, and its inputs. LeftError: there is none."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    reason = ""
    for left in WITHOUT:
        try:
            config = sized(CONFIG_MAPPING[kind], left)
            with torch.device("meta"):
                sketch: Any = AutoModel.from_config(config)
            count = sum(one.numel() for one in sketch.parameters())
            if count > LARGEST:
                reason = f"it has {count} parameters"
                continue
            _seed()
            model: Any = louder(AutoModel.from_config(config).float().eval())
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:100]}"
            continue
        for given in INPUTS:
            try:
                model(**given)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error)[:100]}"
            else:
                return model, given
    raise LeftError(reason)


def sized(kind: Any, left: tuple[str, ...]) -> Any:  # noqa: ANN401 (a class of configurations)
    """A configuration whose parts are all tiny, with a layer of each type."""
    from transformers import PreTrainedConfig

    own = kind()
    sizes = {**PARTS, **SIZES}
    known = {name: one for name, one in sizes.items() if name not in left and _has(own, name)}
    for name in kind.sub_configs:
        part = getattr(own, name, None)
        if isinstance(part, PreTrainedConfig):
            known[name] = sized(type(part), left).to_dict()
    for name in ("layer_types", "mlp_layer_types"):
        types = [*dict.fromkeys(getattr(own, name, None) or ())]
        if types:
            known[name] = [types[at % len(types)] for at in range(SIZES["num_hidden_layers"])]
    if "mrope" in str(getattr(own, "rope_parameters", None)):
        sections = {"mrope_section": [2, 3, 3]}
        known["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **sections}
    return kind(**known)


def louder(model: Any) -> Any:  # noqa: ANN401
    """The model, with weights that are large enough for masks and biases to matter."""
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() < 2:
                one.add_(0.1 * torch.randn_like(one))
            elif 0 < float(one.std()) < 0.1:
                one.mul_(min(0.12 / float(one.std()), 8))
    return model


def _has(config: object, name: str) -> bool:
    """Whether a configuration has one value by this name that can be given; some have one for each
    layer, and some compute it.
    """
    try:
        getattr(config, name)
    except Exception:
        return False
    found = getattr(type(config), name, None)
    return not (isinstance(found, property) and found.fset is None)


def learned(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # noqa: ANN401
    """Logits of tokens that are no padding, and gradients of the loss by name."""
    model.zero_grad()
    out = model(input_ids=IDS, attention_mask=MASK, labels=LABELS, use_cache=False)
    out.loss.backward()
    named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return out.logits.detach()[SEEN], {name: one.clone() for name, one in named.items()}


def distances(rows: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """How far each row is from the exact one, of its norm."""
    return (rows.float() - exact.float()).norm(dim=-1) / exact.float().norm(dim=-1)


def changed(patched: Any, plain: Any, exact: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield what a patched model computes otherwise than the plain one, both compared with fp32.

    A router may choose another expert for a token by rounding: with experts half of the tokens
    decide, and gradients are compared in fp32 alone.
    """
    results = map(learned, (patched, plain, exact))
    (rows, gradients), (own_rows, own), (exact_rows, exact_ones) = results
    rounded = patched.dtype != exact.dtype
    routed = rounded and any(word in name for name in exact_ones for word in ("expert", "router"))
    of_all = torch.median if routed else torch.max
    error, allowed = (float(of_all(distances(one, exact_rows))) for one in (rows, own_rows))
    if not error <= 1.5 * allowed + 2**-8:
        yield f"logits are off by {error:.4f}, unpatched by {allowed:.4f}"
    if missing := sorted(exact_ones.keys() ^ gradients.keys()):
        yield f"gradients of {missing[:3]}"
    wrong = []
    for name, value in ({} if routed else exact_ones).items():
        if name in gradients and float(value.norm()) > 1e-6:
            off, own_off = (float(_off(one[name], value)) for one in (gradients, own))
            if not off <= 3 * own_off + 2**-5:
                wrong.append((off, own_off, name))
    if wrong:
        off, own_off, name = max(wrong)
        most = f"{name} by {off:.4f}, unpatched by {own_off:.4f}"
        yield f"{len(wrong)} gradients are off, that of {most}"


def _off(gradient: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (gradient.float() - exact).norm() / exact.norm()


def tried(kind: str) -> Iterator[str]:
    """Yield what is wrong with a kind of models once they are patched."""
    import warploom

    try:
        plain = made(kind)
    except LeftError as error:
        try:
            apart = made_apart(kind)
        except LeftError as other:
            raise LeftError(f"{error}; {other}") from None
        yield from differences(*apart)
        return
    exact, patched = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    wide = copy.deepcopy(exact)
    done = warploom.patch(patched)
    yield from changed(patched, plain, exact)
    with warploom.patch(wide):  # in fp32 nothing is rounded, and only masks can differ
        yield from (f"in fp32: {one}" for one in changed(wide, exact, exact))
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS.clone()}
    yield from differences(exact, given)
    done.undo()
    if not torch.equal(learned(patched)[0], learned(plain)[0]):
        yield "undo does not restore the model"
    rows = learned(exact)[0]
    for name, options in VARIANTS.items():
        variant = copy.deepcopy(plain)
        try:
            warploom.patch(variant, **options)
        except warploom.errors.ProblemError:
            continue  # refused by name
        try:
            error = float(distances(learned(variant.train())[0], rows).median())
        except warploom.errors.ProblemError:
            continue  # it changes its weights in each call, as RWKV does
        if not error < 1:
            yield f"{name}: logits are off by {error:.2f}"


def try_alone(kind: str, testers: Path | None) -> bool:
    """Try a kind in this process, and print what is wrong; False where something is."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        wrong = [*(tried(kind) if testers is None else tested(kind, testers))]
    except LeftError as error:
        click.echo(f"left  {kind}: {error}")
        return True
    for what in wrong:
        click.echo(f"WRONG {kind}: {what}")
    if not wrong:
        click.echo(f"right {kind}")
    return not wrong


# ---- Calls of any model, compared with the same calls unpatched ---------------------------------


def differences(plain: Any, given: dict[str, Any]) -> Iterator[str]:  # noqa: ANN401
    """Yield what a model computes otherwise once it is patched.

    Args:
        plain: A model in fp32, which is not changed.
        given: What it is called with. The attention mask, where there is one, masks nothing.
    """
    import warploom

    halved = copy.deepcopy(plain).bfloat16()
    ours, ours_halved = copy.deepcopy(plain), copy.deepcopy(halved)
    for one in (ours, ours_halved):
        warploom.patch(one)
    for name, call in {
        **dict(forward_calls(plain, given)),
        **dict(token_calls(plain, given)),
    }.items():
        try:
            want, seen = call(plain)
        except Exception:  # noqa: S112 (the model itself has no such calls)
            continue
        found, _ = call(ours)
        yield from (f"{name}, in fp32: {what}" for what in compared(found, want, seen))
        with as_kernels() as wrong:
            try:
                call(halved)
            except Exception:  # noqa: S112 (the model itself does not compute in bf16)
                continue
            call(ours_halved)
        yield from (f"{name}, as by kernels: {what}" for what in dict.fromkeys(wrong))
    want, found = gradients(plain, given), gradients(ours, given)
    if missing := sorted(want.keys() ^ found.keys()):
        yield f"gradients of {missing[:3]}"
    largest = max([float(one.norm()) for one in want.values()], default=0.0)
    for name in want.keys() & found.keys():
        off = float((found[name] - want[name]).norm())
        if (
            torch.isfinite(want[name]).all()
            and off > 2e-3 * float(want[name].norm()) + 1e-6 * largest
        ):
            yield f"the gradient of {name} is off by {off:.4g}"


Call = Callable[[Any], tuple[Any, torch.Tensor | None]]  # of a model: outputs, and rows to compare


def forward_calls(model: Any, given: dict[str, Any]) -> Iterator[tuple[str, Call]]:  # noqa: ANN401
    """Yield calls of a model with its masks and positions, by name."""
    known = inspect.signature(model.forward).parameters
    ids, keep = given.get("input_ids"), given.get("decoder_input_ids")
    yield "as given", _forward(given, None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or "attention_mask" not in known:
        return
    named = {name: one for name, one in given.items() if name not in ("attention_mask", "labels")}
    rows = ids.shape[1]
    few = max(1, min(3, rows // 3))
    hidden = {
        "left": slice(few),
        "right": slice(-few, None),
        "hole": slice(rows // 2, rows // 2 + 1),
    }
    for name, where in hidden.items():
        mask = torch.ones_like(ids)
        mask[-1, where] = 0
        yield name, _forward({**named, "attention_mask": mask}, mask.bool())
        if isinstance(keep, torch.Tensor) and "decoder_attention_mask" in known and name != "hole":
            mask = torch.ones_like(keep)
            mask[-1, where] = 0
            told = {**named, "decoder_attention_mask": mask}
            yield f"decoder {name}", _forward(told, mask.bool())
    yield "no mask", _forward(named, None)
    if "position_ids" in known and keep is None and rows > 4 and "pixel_values" not in given:
        places = torch.cat([torch.arange(rows // 2), torch.arange(rows - rows // 2)])
        told = {**named, "position_ids": places.expand(ids.shape)}
        yield (
            "packed",
            _forward(told | ({"use_cache": False} if "use_cache" in known else {}), None),
        )
    for last in (1, 3):
        if "logits_to_keep" in known:
            yield f"the last {last}", _forward({**named, "logits_to_keep": last}, None)


def token_calls(model: Any, given: dict[str, Any]) -> Iterator[tuple[str, Call]]:  # noqa: ANN401
    """Yield calls of a model with a cache, by name."""
    ids = given.get("input_ids")
    if not model.can_generate() or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return
    mask = torch.ones_like(ids)
    mask[-1, :2] = 0
    left_out = ("labels", "position_ids", "decoder_input_ids", "decoder_attention_mask")
    named = {name: one for name, one in given.items() if name not in left_out}
    padded = {**named, "attention_mask": mask}
    yield "generated", _generated(named)
    yield "generated behind padding", _generated(padded)
    fixed = {"cache_implementation": "static", "disable_compile": True}
    yield "generated with a static cache", _generated({**padded, **fixed})
    if ids.shape[1] > 4 and not model.config.is_encoder_decoder:
        yield "a prompt in two pieces", partial(_in_pieces, ids=ids, mask=mask)


def _forward(keywords: dict[str, Any], seen: torch.Tensor | None) -> Call:
    def call(model: Any) -> tuple[Any, torch.Tensor | None]:  # noqa: ANN401
        _seed()
        with torch.no_grad():
            return model(**_of_type(copy.deepcopy(keywords), model.dtype)), seen

    return call


def _generated(keywords: dict[str, Any]) -> Call:
    def call(model: Any) -> tuple[Any, torch.Tensor | None]:  # noqa: ANN401
        _seed()
        given = _of_type(copy.deepcopy(keywords), model.dtype)
        return {"tokens": model.generate(**given, **GENERATED).float()}, None

    return call


def _in_pieces(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[Any, None]:  # noqa: ANN401
    half = ids.shape[1] // 2
    with torch.no_grad():
        first = model(input_ids=ids[:, :half], attention_mask=mask[:, :half], use_cache=True)
        cache = first.past_key_values
        second = model(input_ids=ids[:, half:], attention_mask=mask, past_key_values=cache)
    return {"logits": second.logits}, None


def gradients(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """The gradients of a model's loss, or of a sum of its outputs, by name."""
    _seed()
    model.zero_grad()
    out = model(**copy.deepcopy(given))
    loss = getattr(out, "loss", None)
    if loss is None:
        drawn = torch.Generator().manual_seed(0)
        learning = [one for _, one in _numbers(out) if one.requires_grad and one.isfinite().all()]
        sums = [(torch.randn(one.shape, generator=drawn) * one).sum() for one in learning]
        loss = sum(sums, torch.zeros(()))
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return {}
    loss.sum().backward()
    named = model.named_parameters()
    return {name: one.grad.clone() for name, one in named if one.grad is not None}


def compared(found: Any, want: Any, seen: torch.Tensor | None) -> Iterator[str]:  # noqa: ANN401
    """Yield which outputs differ, in rows that are not padding."""
    ours, own = dict(_numbers(found)), dict(_numbers(want))
    if missing := sorted(ours.keys() ^ own.keys()):
        yield f"other outputs: {missing[:3]}"
    for name in ours.keys() & own.keys():
        one, exact = ours[name].detach(), own[name].detach()
        if one.shape != exact.shape:
            yield f"{name} is {list(one.shape)}, not {list(exact.shape)}"
            continue
        if seen is not None and exact.shape[:2] == seen.shape:
            one, exact = one[seen], exact[seen]
        finite = exact.isfinite()
        off = (one - exact)[finite].norm() / (exact[finite].norm() + 1e-6)
        if not off <= 5e-4:
            yield f"{name} is off by {off:.2g}"


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401
    """The tensors of numbers among a model's outputs, by name, but caches and attention weights."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            if not str(key).endswith(("attentions", "past_key_values", "cache_params", "mems")):
                yield from _numbers(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for at, one in enumerate(value):
            yield from _numbers(one, f"{name}.{at}")


def _of_type(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _of_type(one, dtype) for name, one in value.items()}
    return type(value)(_of_type(one, dtype) for one in value) if isinstance(value, list) else value


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


@contextmanager
def as_kernels() -> Iterator[list[str]]:
    """Compute by Warploom's reference what kernels would compute; yield what was wrong in it.

    Steps of a static cache, whose kernels have few head dimensions, are computed here by what they
    are told of lengths.
    """
    from transformers import AttentionInterface

    from warploom.integrations import devices, transformers_attention, transformers_steps

    wrong: list[str] = []
    before = devices.reasons[-1], transformers_attention.elsewhere
    steps: Any = transformers_steps
    own = {name: getattr(steps, name) for name in ("DIMS", "fits", "attend")}
    transformers_attention.elsewhere = lambda tensor: None  # type: ignore[assignment]
    devices.reasons[-1] = None
    steps.DIMS, steps.fits, steps.attend = (*range(512),), lambda *sizes: True, _step
    AttentionInterface.register("warploom", partial(_checked, wrong))
    try:
        yield wrong
    finally:
        devices.reasons[-1], transformers_attention.elsewhere = before
        for name, one in own.items():
            setattr(steps, name, one)
        transformers_attention.register()


def _checked(
    wrong: list[str],
    layer: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,  # noqa: ANN401
    *arguments: Any,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Return a layer's attention, and note where it is not torch's of the same operands in fp32.

    Rows that are padding, or that attend to nothing, are nobody's.
    """
    from warploom.integrations.transformers_attention import attention
    from warploom.integrations.transformers_masks import BoundedMask

    mask = attention_mask
    out, _ = attention(layer, query, key, value, mask, *arguments, **keywords)
    with torch.no_grad():
        operands = (one.float() for one in (query, key, value))
        wide = mask if isinstance(mask, BoundedMask) else _of_type(mask, torch.float32)
        more = {name: _of_type(one, torch.float32) for name, one in keywords.items()}
        exact, _ = attention(layer, *operands, wide, *arguments, **more)
        off = (out.float() - exact).abs()
        if mask is not None:
            tensor = mask.tensor() if isinstance(mask, BoundedMask) else mask
            sees = tensor if tensor.dtype == torch.bool else tensor > -1e4
            seen = sees.any(-1).any(1).expand(off.shape[:2])
            padding = mask._arguments["attention_mask"] if isinstance(mask, BoundedMask) else None
            if padding is not None:
                first = int(mask._arguments["q_offset"])
                own = padding[:, first : first + seen.shape[1]].bool()
                seen = seen & pad(own, (0, seen.shape[1] - own.shape[1]))
            off = off * seen[..., None, None]
        if off.numel() and float(off.max()) > 0.03 * float(value.abs().max()):
            wrong.append(f"an attention of {type(layer).__name__} is off by {float(off.max()):.2g}")
    return out, None


def _step(call: Any, bounds: Any) -> torch.Tensor:  # noqa: ANN401
    """A step's attention [batch, rows, heads, dim] by the lengths that kernels are told."""
    from warploom.integrations import torch_attention

    rows, keys = call.query.shape[2], torch.arange(call.key.shape[2])
    last = bounds.lengths[:, None, None].long()
    row = last - rows + torch.arange(rows)[:, None]
    sees = (keys < last) if rows > 1 and not bounds.causal else keys <= row
    if bounds.starts is not None:
        sees = sees & (keys >= bounds.starts[:, None, None])
    if bounds.window is not None:
        sees = sees & (row - keys <= bounds.window)
    return torch_attention._composite(call, sees[:, None]).transpose(1, 2).contiguous()


# ---- Models of transformers' own tests -----------------------------------------------------------


def tested(kind: str, testers: Path) -> Iterator[str]:
    """Yield what is wrong with the models that transformers' tests of a kind make."""
    import transformers

    sys.path.insert(0, str(testers))
    (file,) = testers.glob(f"tests/models/{kind}/test_modeling_{kind}.py")
    module = importlib.import_module(".".join(file.relative_to(testers).with_suffix("").parts))
    known, reason, any_tried = set[type](), "its tests make no models", False
    for case in vars(module).values():
        if not (inspect.isclass(case) and issubclass(case, unittest.TestCase)):
            continue
        try:
            test: Any = case("setUp")
            test.setUp()
            config, given = test.model_tester.prepare_config_and_inputs_for_common()
        except Exception as error:
            reason = f"{case.__name__}: {type(error).__name__}"
            continue
        for own in set(test.all_model_classes) - known:
            known.add(own)
            if not issubclass(own, transformers.PreTrainedModel):
                continue
            try:
                named = test._prepare_for_class(copy.deepcopy(given), own, return_labels=True)
                plain, named = _tiny(own, config, dict(named))
            except Exception as error:
                reason = f"{own.__name__}: {type(error).__name__}: {str(error)[:100]}"
                continue
            any_tried = True
            yield from (f"{own.__name__}: {what}" for what in differences(plain, named))
    if not any_tried:
        raise LeftError(reason)


def _tiny(own: Any, config: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
    """A model of a class, whose weights are large enough to matter, and its inputs unpadded."""
    _seed()
    model = own(copy.deepcopy(config)).eval()
    for name in ("attention_mask", "decoder_attention_mask"):
        if isinstance(given.get(name), torch.Tensor) and given[name].dim() == 2:
            given[name] = torch.ones_like(given[name])
    ids = given.get("input_ids")
    known = inspect.signature(model.forward).parameters
    if "mm_token_type_ids" in known and isinstance(ids, torch.Tensor):  # older tests do not tell
        given.setdefault("mm_token_type_ids", (ids == getattr(config, "image_token_id", -1)).long())
    loud = louder(copy.deepcopy(model))
    with torch.no_grad():
        outputs = _numbers(loud(**copy.deepcopy(given)))
    return loud if all(bool(one.isfinite().all()) for _, one in outputs) else model, given


# ---- All of them ---------------------------------------------------------------------------------


def separately(kind: str, testers: Path | None) -> bool:
    """Try a kind in a process, and print what it says."""
    command = [sys.executable, __file__, "--one", kind]
    command += [] if testers is None else ["--testers", str(testers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["HF_HUB_OFFLINE"] = "1"
    try:
        done = subprocess.run(  # noqa: S603 (ourselves)
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        click.echo(f"WRONG {kind}: {SECONDS} s do not suffice")
        return False
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("WRONG", "left", "right"))
    ]
    if not lines:  # it ended by an error
        lines = [f"WRONG {kind}: {done.stderr[-2000:]}"]
    click.echo("\n".join(lines))
    return done.returncode == 0


@click.command()
@click.argument("kinds", nargs=-1)
@click.option("--jobs", type=int, default=os.cpu_count(), show_default=True)
@click.option(
    "--testers",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkout of transformers, whose tests make the models.",
)
@click.option("--one", "alone", is_flag=True, hidden=True, help="In this process.")
def main(kinds: tuple[str, ...], jobs: int, testers: Path | None, *, alone: bool) -> None:
    """Try all KINDS of models, or those named, such as llama and qwen3_moe."""
    from transformers.models.auto import modeling_auto as auto

    names = [*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_MAPPING_NAMES]
    if testers is not None:
        names = sorted(one.parent.name for one in testers.glob("tests/models/*/test_modeling_*.py"))
    if unknown := sorted({*kinds} - {*names}):
        raise click.BadParameter(f"no kind of transformers' models: {', '.join(unknown)}")
    if alone:
        sys.exit(not all(try_alone(kind, testers) for kind in kinds))
    with ThreadPoolExecutor(jobs) as pool:
        right = [*pool.map(partial(separately, testers=testers), kinds or dict.fromkeys(names))]
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
