"""Patches tiny models of every kind that transformers generates text with: `try_transformers.py`.

For a new version of transformers: which models lose a mask, a gradient or a bias once they are
patched? Each kind (default: all; or those named) has a process of its own, which compares the model
with the same one unpatched, on a padded batch: logits, gradients, tokens that are generated, and
what `undo` restores. Then quantized weights, fp8 recipes and attention of 8 bits are tried. It runs
without a GPU, where torch computes attention by the masks that kernels would get.

Kinds that cannot be made so small are told, with the reason. The exit status is 1 where one failed.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
WITHOUT: tuple[tuple[str, ...], ...] = (  # sizes that are left out where a model is none with them
    (),
    ("sliding_window",),
    ("head_dim",),
    ("num_key_value_heads",),
    ("head_dim", "num_key_value_heads"),
    ("sliding_window", "head_dim", "num_key_value_heads", "intermediate_size"),
)
LARGEST = 30_000_000  # parameters of a model that is still tiny
ROWS = 12
IDS = torch.randint(3, 100, (2, ROWS), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0
SEEN = MASK.bool()
# Of a row that is padding, the next token is no label: what such rows say is no result.
LABELS = IDS.masked_fill(~SEEN | ~pad(SEEN, (1, 0), value=True)[:, :-1], -100)
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
    """A tiny model in bf16, which learns and generates. LeftError says why there is none."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_of, reason = CONFIG_MAPPING[kind], ""
    try:
        own = config_of()
    except Exception as error:
        raise LeftError(f"no configuration without arguments: {type(error).__name__}") from error
    known = {name: size for name, size in SIZES.items() if _has(own, name)}
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
            learned(model.bfloat16().eval())
            model.generate(IDS, attention_mask=MASK, **GENERATED)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        else:
            return model
    raise LeftError(reason)


def _has(config: object, name: str) -> bool:
    """Whether a configuration has one value by this name; some have one for each layer."""
    try:
        getattr(config, name)
    except Exception:
        return False
    return True


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


def parted(patched: Any, plain: Any, exact: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield where two models generate other tokens although one is clearly the likelier."""
    ours, own = (one.generate(IDS, attention_mask=MASK, **GENERATED) for one in (patched, plain))
    differ = (ours != own).any(0).nonzero()
    if not len(differ):
        return
    at = int(differ[0])
    mask = pad(MASK, (0, at - ROWS), value=1)
    with torch.no_grad():
        logits = exact(input_ids=own[:, :at], attention_mask=mask).logits[:, -1]
    row = int((ours[:, at] != own[:, at]).nonzero()[0])
    gap = float((logits[row, own[row, at]] - logits[row, ours[row, at]]) / logits[row].std())
    if abs(gap) > 0.2:
        yield f"token {at} is another, {gap:.2f} standard deviations less likely"


def tried(kind: str) -> Iterator[str]:
    """Yield what is wrong with a kind of models once they are patched."""
    import warploom

    plain = made(kind)
    exact, patched = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    wide = copy.deepcopy(exact)
    done = warploom.patch(patched)
    yield from changed(patched, plain, exact)
    with warploom.patch(wide):  # in fp32 nothing is rounded, and only masks can differ
        yield from (f"in fp32: {one}" for one in changed(wide, exact, exact))
    yield from parted(patched, plain, exact)
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
        error = float(distances(learned(variant.train())[0], rows).median())
        if not error < 1:
            yield f"{name}: logits are off by {error:.2f}"


def try_alone(kind: str) -> bool:
    """Try a kind in this process, and print what is wrong; False where something is."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        wrong = [*tried(kind)]
    except LeftError as error:
        click.echo(f"left  {kind}: {error}")
        return True
    for what in wrong:
        click.echo(f"WRONG {kind}: {what}")
    if not wrong:
        click.echo(f"right {kind}")
    return not wrong


# ---- All of them ---------------------------------------------------------------------------------


def separately(kind: str) -> bool:
    """Try a kind in a process, and print what it says."""
    command = [sys.executable, __file__, "--one", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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
@click.option("--one", "alone", is_flag=True, hidden=True, help="In this process.")
def main(kinds: tuple[str, ...], jobs: int, *, alone: bool) -> None:
    """Try all KINDS of models, or those named, such as llama and qwen3_moe."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if unknown := sorted({*kinds} - NAMES.keys()):
        raise click.BadParameter(f"no kind of transformers' models: {', '.join(unknown)}")
    if alone:
        sys.exit(not all(map(try_alone, kinds)))
    with ThreadPoolExecutor(jobs) as pool:
        right = [*pool.map(separately, kinds or NAMES)]
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
