"""examples/generate.py, tiny: tokens are compared, and differ only where rounding decides."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import generate
import llama
import warploom
from steps import Steps


def run(*arguments: str) -> Result:
    return CliRunner().invoke(generate.main, ["--rounds", "1", *arguments])


def test_tokens_agree_and_are_as_many_as_asked_for() -> None:
    done = run("--tiny", "--batch", "2", "--new-tokens", "5", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["tokens"] == {"torch": 10, "warploom": 10} and found["partings"] == []
    assert all(speed > 0 for speed in found["tokens per second"].values())
    assert "every token agrees" in run("--tiny", "--new-tokens", "2").stdout


def test_steps_with_a_cache_of_a_fixed_size_choose_the_same_tokens() -> None:
    """In a cache that is larger than the text, twice: a second text begins where the first did."""
    asked = ("--tiny", "--batch", "2", "--prompt-tokens", "9", "--new-tokens", "5", "--json")
    plain, steps = (run(*asked, *more) for more in ((), ("--graph", "--cache", "40")))
    assert steps.exit_code == 0, steps.output
    assert json.loads(steps.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]
    model = llama.random_llama(torch.device("cpu"), tiny=True).eval()
    texts = torch.randint(0, 128, (2, 2, 9))
    held = Steps(model, 2, 40)
    for text in texts:
        wanted = generate.generate(model, text, 5, compiled=False)
        assert torch.equal(held.generate(text, 5), wanted)
    with pytest.raises(ValueError, match="a cache of 40 keys for 9 \\+ 32 tokens"):
        held.generate(texts[0], 32)


@pytest.mark.parametrize(
    ("options", "told"),
    [(("--graph", "--compile"), "one of them"), (("--cache", "40"), "must come with --graph")],
)
def test_options_that_say_nothing_together_are_refused(options: tuple[str, ...], told: str) -> None:
    refused = run("--tiny", *options)
    assert refused.exit_code == 2 and told in refused.stderr


def test_a_patch_that_changes_the_tokens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: LlamaForCausalLM) -> None:
        model.lm_head.weight.data.neg_()

    monkeypatch.setattr(warploom, "patch", wrong)
    done = run("--tiny")
    assert done.exit_code == 3
    assert "row 0 parts at token 16" in done.stdout


@dataclass
class Rounding:
    """A model whose logits of one place lie `difference` apart; another is rounded by 1/32."""

    difference: float
    seen: list[Any]
    error: float = 2**-5

    def float(self) -> Rounding:
        return Rounding(self.difference, [], error=0)

    def __call__(self, text: torch.Tensor) -> SimpleNamespace:
        self.seen.append(text.tolist())
        last = [self.error, 4.0, 0.0, 4 - self.difference]
        return SimpleNamespace(logits=torch.tensor([[[0.0] * 4, last]]))


@pytest.mark.parametrize(("difference", "by_rounding"), [(0.06, True), (0.07, False)])
def test_tokens_may_part_where_rounding_decides(difference: float, by_rounding: bool) -> None:
    """And only the first difference of a row counts: what follows is another text."""
    ours = torch.tensor([[0, 1, 2, 3], [0, 1, 1, 1]])
    peers = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2]])
    model = Rounding(difference, [])
    (found,) = generate.compare(model, ours, peers, begin=1)
    assert (found.row, found.position, model.seen) == (1, 2, [[[0, 1]]])
    assert found.by_rounding == by_rounding


def test_a_model_of_this_machine_goes_on_with_a_prompt(tmp_path: Path) -> None:
    words = {f"word{index}": index for index in range(llama.TINY["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    llama.random_llama(torch.device("cpu"), tiny=True).save_pretrained(tmp_path)
    asked = ("--model", str(tmp_path), "--prompt", "word7 word9", "--new-tokens", "3")
    done = run(*asked, "--json")
    assert done.exit_code == 0, done.output
    text = json.loads(done.stdout)["text"].split()
    assert text[:2] == ["word7", "word9"] and len(text) == 5


def test_a_prompt_without_a_model_is_refused() -> None:
    refused = run("--tiny", "--prompt", "word7")
    assert refused.exit_code == 2 and "--model" in refused.stderr
