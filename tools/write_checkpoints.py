"""Write tests/integrations/checkpoints anew: tiny checkpoints, by the packages that quantize.

python tools/write_checkpoints.py PACKAGE [NAME ...]

Each package wants an environment of its own, without a GPU or a compiler, beside torch for the CPU:

    llmcompressor   pip install llmcompressor
    auto-round      pip install auto-round autoawq
    gptqmodel       pip install gptqmodel pillow; GPTQMODEL_CPU_WORKERS=2
    autoawq         pip install autoawq
    transformers    pip install transformers

A folder is written for each checkpoint of the package: config.json and model.safetensors, as the
package wrote them, and weights.json: what wrote it, and the dtype and SHA-256 of each weight as the
package itself dequantizes it, which test_written_checkpoints.py compares.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "tests/integrations/checkpoints"
VOCABULARY, GROUP = 16, 32  # words; elements of K that share a scale
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen3": {},
    "Qwen3Moe": {**EXPERTS, "num_experts": 2, "moe_intermediate_size": 64},
    "Mixtral": {**EXPERTS, "num_local_experts": 2, "sliding_window": None},
    "GptOss": {**EXPERTS, "num_local_experts": 2, "sliding_window": 8},
}
Weights = dict[str, Tensor]
# Writes a checkpoint of the model in a folder to another, and returns its weights, dequantized.
Writer = Callable[..., Weights]


def model(kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> None:
    """Write a model with random weights, and a tokenizer of as many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **MODELS[kind], **sizes})
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    made.to(dtype).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{one}": one for one in range(VOCABULARY)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def loaded(folder: Path) -> Any:  # noqa: ANN401 (of transformers)
    """The model of a folder in bf16."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def tokens(seed: int, count: int) -> Tensor:
    """A row of random words, none of which is special."""
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


# ---- llm-compressor ------------------------------------------------------------------------------


def llmcompressor(given: Path, out: Path, **recipe: Any) -> Weights:
    """By a preset scheme, or as `_modifier` takes it."""
    import datasets
    from compressed_tensors.compressors import decompress_module
    from llmcompressor import oneshot

    made = loaded(given)
    rows = [tokens(seed, 32)[0].tolist() for seed in range(8)]
    samples = datasets.Dataset.from_dict(
        {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    )
    oneshot(
        model=made,
        tokenizer=str(given),
        dataset=samples,
        recipe=_modifier(**recipe),
        num_calibration_samples=len(rows),
        max_seq_length=32,
    )
    made.save_pretrained(out, save_compressed=True)
    layers = {n: m for n, m in made.named_modules() if getattr(m, "quantization_scheme", None)}
    for layer in layers.values():
        decompress_module(layer)
    return {name: layer.weight.detach() for name, layer in layers.items()}


def _modifier(scheme: str | None = None, *, gptq: bool = False, **weights: Any) -> Any:  # noqa: ANN401
    """The quantization of a preset scheme, or of integers of 4 bits in groups."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    kind = GPTQModifier if gptq else QuantizationModifier
    ignore = ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*router$"]
    if scheme is not None:
        return kind(targets="Linear", scheme=scheme, ignore=ignore)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, **weights)
    group = QuantizationScheme(targets=["Linear"], weights=args)
    return kind(config_groups={"group_0": group}, ignore=ignore)


# ---- auto-round ----------------------------------------------------------------------------------


def auto_round(given: Path, out: Path, *, format: str, **options: Any) -> Weights:
    """By rounding to nearest, without search."""
    from auto_round import AutoRound
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    words = transformers.AutoTokenizer.from_pretrained(given)
    options = {"bits": 4, "group_size": GROUP, "iters": 0, "disable_opt_rtn": True, **options}
    AutoRound(loaded(given), words, device_map="cpu", **options).quantize_and_save(out, format)
    (inside,) = out.rglob("config.json")
    if inside.parent != out:
        shutil.copytree(inside.parent, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    packing = config.get("packing_format", format)
    if "awq" in packing:
        return _packed(out, partial(_awq, size=GROUP))
    kind = qlinear_torch if packing == "auto_round" else qlinear_torch_zp

    def weight(tensors: Weights) -> Tensor:
        rows, n = tensors["qweight"].shape
        layer = kind.QuantLinear(options["bits"], GROUP, rows * 32 // options["bits"], n, False)
        layer.load_state_dict(tensors, strict=False)
        return layer(torch.eye(layer.infeatures, dtype=torch.float16)).t()

    return _packed(out, weight)


def _packed(out: Path, weight: Callable[[Weights], Tensor]) -> Weights:
    """The weight of each layer with a qweight, by a package's own function of its tensors."""
    layers: dict[str, Weights] = {}
    for key, tensor in load_file(out / "model.safetensors").items():
        layer, _, name = key.rpartition(".")
        layers.setdefault(layer, {})[name] = tensor
    return {layer: weight(one) for layer, one in layers.items() if "qweight" in one}


# ---- AutoAWQ and GPTQModel -----------------------------------------------------------------------


def _awq(tensors: Weights, size: int) -> Tensor:
    from awq.utils.packing_utils import dequantize_gemm

    given = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    found: Tensor = dequantize_gemm(*given, 4, size)
    return found.t()


def autoawq(given: Path, out: Path) -> Weights:
    """By the layout "gemm", with zero points."""
    from awq import AutoAWQForCausalLM

    made = AutoAWQForCausalLM.from_pretrained(str(given), device_map="cpu", dtype=torch.float16)
    made.quantize(
        transformers.AutoTokenizer.from_pretrained(given),
        quant_config={"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"},
        calib_data=[tokens(seed, 32)[0].tolist() for seed in range(64)],
        max_calib_seq_len=32,
        apply_clip=False,  # which takes numbers of rows that 64 divides
    )
    made.save_quantized(str(out))
    return _packed(out, partial(_awq, size=GROUP))


def gptqmodel(given: Path, out: Path, **options: Any) -> Weights:
    """By its QuantizeConfig: 4 bits, symmetric, without act-order, if not told otherwise."""
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.nn_modules.qlinear import PackableQuantLinear
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    options = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, **options}
    made = GPTQModel.load(str(given), QuantizeConfig(**options), device="cpu", dtype=torch.bfloat16)
    rows = [tokens(seed, 32) for seed in range(8)]
    samples = [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in rows]
    made.quantize(samples, batch_size=1)
    made.save(str(out))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "awq":
        return _packed(out, partial(_awq, size=GROUP))

    def weight(tensors: Weights) -> Tensor:
        bits = options["bits"]
        known = {key: options[key] for key in ("bits", "group_size", "desc_act", "sym")}
        k, n = tensors["qweight"].shape[0] * 32 // bits, tensors["qweight"].shape[1]
        layer = TorchLinear(
            **known, in_features=k, out_features=n, bias=False, register_buffers=True
        )
        layer.load_state_dict(tensors, strict=False)
        if config["checkpoint_format"] == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer._init_wf_unsqueeze_buffers()
        found: Tensor = PackableQuantLinear.dequantize_weight(layer)
        return found.t()

    return _packed(out, weight)


# ---- transformers --------------------------------------------------------------------------------


def fp8(given: Path, out: Path) -> Weights:
    """By blocks: layers are replaced and quantized as a model is loaded, for which the package
    wants a GPU, but needs none.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts, FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None
    block = {"weight_block_size": (32, 32), "modules_to_not_convert": ["lm_head"]}
    made = transformers.AutoModelForCausalLM.from_pretrained(
        given,
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        quantization_config=transformers.FineGrainedFP8Config(**block),
    )
    made.save_pretrained(out)
    weight = Fp8Dequantize(None)._dequantize_one
    found = {}
    for name, module in made.named_modules():
        if isinstance(module, FP8Linear):
            found[name] = weight(module.weight.detach(), module.weight_scale_inv.detach())
        elif isinstance(module, FP8Experts):
            gate_up, down = (
                weight(
                    getattr(module, part).detach(), getattr(module, f"{part}_scale_inv").detach()
                )
                for part in ("gate_up_proj", "down_proj")
            )
            for expert in range(len(down)):
                parts = (*gate_up[expert].chunk(2), down[expert])
                for part, one in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
                    found[f"{name}.{expert}.{part}"] = one
    return found


# By package: the checkpoint's name, its model, and what its writer and the model are told.
WRITERS: dict[str, tuple[Writer, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]]] = {
    "llmcompressor": (
        llmcompressor,
        {
            "w4a16": ("Qwen3", {}, {}),
            "w4a16-zero-points": (
                "Llama",
                {"gptq": True, "symmetric": False, "actorder": "static"},
                {},
            ),
            "w8a8": ("Mistral", {"scheme": "W8A8"}, {}),
            "fp8": ("Llama", {"scheme": "FP8"}, {}),
            "fp8-block": ("Qwen3", {"scheme": "FP8_BLOCK"}, {"intermediate_size": 160}),
            "nvfp4a16": ("Llama", {"scheme": "NVFP4A16"}, {}),
            "mxfp4a16": ("Mistral", {"scheme": "MXFP4A16"}, {}),
            "mxfp8a16": ("Qwen3", {"scheme": "MXFP8A16"}, {}),
            "w4a16-qwen3-moe": ("Qwen3Moe", {}, {}),
            "fp8-mixtral": ("Mixtral", {"scheme": "FP8_DYNAMIC"}, {}),
            "nvfp4a16-mixtral": ("Mixtral", {"scheme": "NVFP4A16"}, {}),
            "mxfp4a16-gpt-oss": ("GptOss", {"scheme": "MXFP4A16"}, {}),
        },
    ),
    "auto-round": (
        auto_round,
        {
            "own": ("Qwen3", {"format": "auto_round"}, {}),
            "own-zero-points": ("Llama", {"format": "auto_round", "sym": False}, {}),
            "auto-gptq": ("Mistral", {"format": "auto_gptq"}, {}),
            "auto-awq": ("Llama", {"format": "auto_awq", "sym": False}, {}),
            "own-qwen3-moe": ("Qwen3Moe", {"format": "auto_round"}, {}),
        },
    ),
    "gptqmodel": (
        gptqmodel,
        {
            "v1": ("Llama", {}, {}),
            "v2-zero-points": ("Mistral", {"sym": False, "format": "gptq_v2"}, {}),
            "8-bits": ("Qwen3", {"bits": 8}, {}),
            "v1-mixtral": ("Mixtral", {}, {}),
        },
    ),
    "autoawq": (autoawq, {"gemm": ("Llama", {}, {"dtype": torch.float16})}),
    "transformers": (fp8, {"fp8": ("Qwen3", {}, {}), "fp8-qwen3-moe": ("Qwen3Moe", {}, {})}),
}
ALSO = {"llmcompressor": ("compressed-tensors",)}  # what else decides what is written
README = """# Checkpoints that packages wrote

`tools/write_checkpoints.py` had them written, and `test_written_checkpoints.py` reads them: models
of one layer with random weights. Each folder has config.json and model.safetensors as the package
wrote them, and weights.json: the dtype and SHA-256 of each weight as the package itself dequantizes
it (-0 counts as 0).

| folder | model | written by |
| --- | --- | --- |
"""


def write(package: str, name: str) -> None:
    """Write one checkpoint, and what is known of it."""
    writer, known = WRITERS[package]
    kind, told, sizes = known[name]
    target = FOLDER / f"{package}-{name}"
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, kind), Path(folder, "out")
        model(kind, given, **sizes)
        weights = writer(given, out, **told)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(out / file, target / file)
    packages = dict.fromkeys((package, *ALSO.get(package, ()), "transformers"))
    about = {
        "model": kind,
        "written by": [f"{one} {importlib.metadata.version(one)}" for one in packages],
        "weights": {
            layer.replace(".block_sparse_moe.", ".mlp."): (
                str(weight.dtype).removeprefix("torch."),
                sha256(weight),
            )
            for layer, weight in weights.items()
        },
    }
    (target / "weights.json").write_text(json.dumps(about) + "\n")


def readme() -> str:
    """The list of all checkpoints."""
    rows = []
    for path in sorted(FOLDER.glob("*/weights.json")):
        about = json.loads(path.read_text())
        rows.append(f"| {path.parent.name} | {about['model']} | {', '.join(about['written by'])} |")
    return README + "\n".join(rows) + "\n"


def sha256(weight: Tensor) -> str:
    """The digest of a weight's bytes, in which -0 is 0: some of it are products."""
    octets = (weight + 0).contiguous().view(torch.uint8)
    return hashlib.sha256(octets.numpy().tobytes()).hexdigest()


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=[*WRITERS])
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    for name in given.names or WRITERS[given.package][1]:
        write(given.package, name)
        print(given.package, name, "written")
    (FOLDER / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
