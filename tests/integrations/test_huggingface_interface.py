"""Models with an attention of their own refuse Warploom's by name, where they would lose masks."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCABULARY, model
from transformers import BertConfig, BertModel, EncoderDecoderConfig, EncoderDecoderModel

import warploom
from warploom.errors import ProblemError
from warploom.integrations import transformers_interface

ROWS = 13
IDS = torch.randint(2, VOCABULARY, (2, ROWS), generator=torch.Generator().manual_seed(0))
RIGHT = torch.ones_like(IDS)
RIGHT[0, 9:] = 0
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "initializer_range": 0.3}
LAYERS = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
XGLM = {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2, "init_std": 0.3}
OWN: dict[str, dict[str, Any]] = {  # models that ask for masks, by the name of the implementation
    "Bloom": {**SIZES, "n_layer": 2, "n_head": 2},
    "Mpt": {**SIZES, "d_model": 32, "n_layers": 2, "n_heads": 2},
    "CodeGen": {**SIZES, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "GPTNeoXJapanese": LAYERS,
    "XGLM": {**SIZES, **XGLM},
    "RoFormer": LAYERS,
    "RemBert": LAYERS,
    "MPNet": LAYERS,
    "Nystromformer": LAYERS,
}


ENDS = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
EAGER: dict[str, dict[str, Any]] = {  # use the interface, and support no other attention
    "Splinter": LAYERS,
    "BigBirdPegasus": {**ENDS, "vocab_size": VOCABULARY, "init_std": 0.3, "block_size": 4},
    "PegasusX": {**ENDS, "vocab_size": VOCABULARY, "init_std": 0.3, "block_size": 4},
}


@pytest.fixture(autouse=True)
def registered() -> None:
    warploom.register_transformers()


def of(name: str, attention: str, head: str = "Model") -> Any:  # noqa: ANN401
    """A model with random weights, always the same."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(pad_token_id=0, **{**OWN, **EAGER}[name])
    kind = getattr(transformers, f"{name}{head}")
    return kind._from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("case", [{}, {"attention_mask": RIGHT}])
def test_they_are_refused_or_compute_the_same(name: str, case: dict[str, Any]) -> None:
    """Bloom without its mask sees what comes after, and BERT-likes what is padding."""
    right = of(name, "eager")(IDS, **case)[0]
    try:
        found = of(name, "warploom")(IDS, **case)[0]
    except ProblemError as error:
        assert f"for {name}Model" in str(error)
        assert 'attn_implementation="eager"' in error.fix
        return
    assert (found - right).abs().max() < 1e-4 * right.abs().max()


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("case", [{}, {"attention_mask": RIGHT}])
def test_models_that_support_eager_attention_alone_get_its_masks(
    name: str, case: dict[str, Any]
) -> None:
    """Their layers may not say that they are not causal, or add their masks to scores."""
    more = {"decoder_input_ids": IDS} if name in ("BigBirdPegasus", "PegasusX") else {}
    right = of(name, "eager")(IDS, **case, **more)[0]
    found = of(name, "warploom")(IDS, **case, **more)[0]
    assert (found - right).abs().max() < 1e-4 * right.abs().max()


def test_without_a_mask_they_attend_to_every_key() -> None:
    """BridgeTower's layers between text and image say that they are causal; eager ignores it."""
    from transformers.models.bridgetower import modeling_bridgetower

    results = []
    for name in ("eager", "warploom"):
        torch.manual_seed(0)
        config = transformers.BridgeTowerTextConfig(**LAYERS)
        config._attn_implementation = name
        layer = modeling_bridgetower.BridgeTowerSelfAttention(config, is_causal=True)
        results.append(layer(torch.randn(1, 5, 32))[0])
    torch.testing.assert_close(results[1], results[0])


def test_however_it_is_set_it_is_refused() -> None:
    """In the configuration of a model that there is, in generation, compiled."""
    speaking = of("Bloom", "eager", "ForCausalLM")
    right = speaking(IDS)[0]
    speaking.set_attn_implementation("warploom")  # transformers warns, and leaves it
    assert torch.equal(speaking(IDS)[0], right)
    speaking.config._attn_implementation = "warploom"
    refused = pytest.raises(ProblemError, match="for Bloom")
    with refused:
        speaking(IDS)
    with refused:
        speaking.generate(IDS, max_new_tokens=2)
    with refused:
        speaking.generate(IDS, max_new_tokens=2, cache_implementation="static")
    torch._dynamo.reset()
    with refused:
        torch.compile(speaking, backend="eager")(IDS)


def test_a_part_of_a_model_is_refused_alone() -> None:
    """BERT reads by Warploom, and a decoder with an attention of its own speaks by it."""
    reading = BertConfig(**LAYERS)
    speaking = transformers.RemBertConfig(is_decoder=True, add_cross_attention=True, **LAYERS)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(reading, speaking)
    both = EncoderDecoderModel(config).eval()
    right = both(IDS, decoder_input_ids=IDS)[0]
    both.config._attn_implementation = "warploom"
    both.encoder(IDS)
    with pytest.raises(ProblemError, match="for RemBertModel"):
        both(IDS, decoder_input_ids=IDS)
    both.config._attn_implementation = {"encoder": "warploom", "decoder": "eager"}
    assert (both(IDS, decoder_input_ids=IDS)[0] - right).abs().max() < 1e-4 * right.abs().max()


SOURCE = """
import torch
from transformers import {base}PreTrainedModel, {base}Model
from transformers.masking_utils import create_causal_mask

{attention}

class Custom({base}PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.inner = {base}Model(config) if {wraps} else None
        self.post_init()

    def forward(self, input_ids):
        if self.inner is not None:
            return self.inner(input_ids)[0]
        embedded = torch.zeros(*input_ids.shape, 4)
        return create_causal_mask(self.config, embedded, None, None)
"""
OWN_ATTENTION = "class CustomAttention(torch.nn.Module):\n    pass\n"
INDEXED = f"{OWN_ATTENTION}\nFOUND = 'ALL_ATTENTION_FUNCTIONS[config._attn_implementation]'\n"


@pytest.mark.parametrize(
    ("attention", "wraps", "refused"),
    [(OWN_ATTENTION, False, True), (OWN_ATTENTION, True, False), (INDEXED, False, False)],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_code_that_comes_with_a_model_is_asked_too(
    attention: str,
    wraps: bool,
    refused: bool,
    compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has a configuration of transformers, whose own model does use the interface.

    What transformers keeps of a base class is not taken for what a class inherits; source that
    indexes the interface is of transformers 4. Which model asks cannot be told in a graph.
    """
    name = f"custom_{tmp_path.name}"
    source = SOURCE.format(base="Llama", attention=attention, wraps=wraps)
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    custom = importlib.import_module(name)
    assert transformers.LlamaPreTrainedModel._can_set_attn_implementation()
    config = copy.deepcopy(model("Llama", "eager").config)
    asking = custom.Custom._from_config(config, attn_implementation="warploom").eval()
    call = torch.compile(asking, backend="eager") if compiled else asking
    if refused and not compiled:
        with pytest.raises(ProblemError, match="for Custom"):
            call(IDS)
    else:
        call(IDS)
    sys.modules.pop(name)


def test_a_class_whose_source_nobody_can_read_may_hold_a_model_that_is_known() -> None:
    """As in a notebook; transformers says that it cannot be set, which its part can."""

    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    Mine.__module__ = "nowhere"
    config = copy.deepcopy(model("Llama", "eager").config)
    speaking = Mine._from_config(config, attn_implementation="warploom").eval()
    assert not transformers_interface.uses_interface(Mine)
    assert speaking(IDS, attention_mask=RIGHT).logits.isfinite().all()
    assert speaking.generate(IDS, max_new_tokens=2, cache_implementation="static").shape[0] == 2


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "bert", "roberta", "t5", "bart"),
        *("whisper", "clip", "llava", "modernbert", "vit", "albert", "gpt_bigcode", "phi"),
        *("bloom", "falcon", "mpt", "gptj", "gpt_neo", "codegen", "xlnet", "deberta", "mpnet"),
        *("xglm", "rembert", "led", "longformer", "blip", "flava", "speecht5", "layoutlmv3"),
    ],
)
def test_classes_are_told_apart_as_transformers_does(name: str) -> None:
    """By class and by configuration, as a mask is asked for: none refused that uses it."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kinds = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)
        if one.__module__ == module.__name__
    ]
    assert kinds
    for kind in kinds:
        uses = kind._can_set_attn_implementation()
        assert transformers_interface.uses_interface(kind) is uses
        for config in transformers_interface._configurations(kind):
            assert isinstance(config, type)
            given = config.__new__(config)
            if uses:
                transformers_interface.mask_kind(given, "warploom")
            else:
                with pytest.raises(ProblemError, match=r"^attn_implementation='warploom' for \w+:"):
                    transformers_interface.mask_kind(given, "warploom")


def test_a_patch_leaves_parts_whose_attention_is_their_own() -> None:
    """transformers sets configurations of parts that are no models, which then lose their mask."""
    config = transformers.BlipConfig(
        text_config={**LAYERS, "projection_dim": 16},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                       "num_attention_heads": 2, "image_size": 8, "patch_size": 4},
    )  # fmt: skip
    seeing = transformers.BlipModel(config).eval()
    given = {"input_ids": IDS, "attention_mask": RIGHT, "pixel_values": torch.ones(2, 3, 8, 8)}
    right = seeing(**given).text_embeds
    with warploom.patch(seeing) as patch:
        assert (seeing(**given).text_embeds - right).abs().max() < 1e-4
        rows = {row.what: row.because for row in patch.rows}
        assert "does not use" in rows["attention of BlipModel"]
    bert = BertModel(BertConfig(**LAYERS))
    with warploom.patch(torch.nn.ModuleList([seeing, bert])):
        assert bert.config._attn_implementation == "warploom"
