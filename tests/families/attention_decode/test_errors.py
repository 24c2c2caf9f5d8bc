"""What decoding refuses, it refuses before anything runs: value, rule and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_calls import E4M3, Case, ends, fixed, ints, paged, random

import warploom
from warploom.errors import ProblemError

Refused = Callable[[], object]
FIXED, PAGED = fixed((17, 40), rows=2), paged((17, 40), rows=2)
BYTES, WHOLE = fixed((17, 40), cache=E4M3), fixed((17, 40), cache=torch.int8)
PACKED = Case(random(3, 4, 64), FIXED.k, FIXED.v, {"cu_seqlens_q": ends(2, 1), "max_seqlen_q": 2})
KEYS = Case(FIXED.q, FIXED.k[0].transpose(0, 1), FIXED.v[0].transpose(0, 1))
ONE, HEADS, TOKENS = torch.ones(()), torch.ones(2), torch.ones(2, 2, 40)


def of(case: Case, **keywords: Any) -> Refused:
    tensors = {name: keywords.pop(name, getattr(case, name)) for name in "qkv"}
    given = {**case.keywords, **keywords}
    return lambda: warploom.attention_decode(**tensors, **given)


def both(case: Case, change: Callable[[torch.Tensor], torch.Tensor], **keywords: Any) -> Refused:
    return of(case, k=change(case.k), v=change(case.v), **keywords)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, each row one element further from the next."""
    room = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)
    room[..., :-1] = tensor
    return room[..., :-1]


TABLE = PAGED.keywords["page_table"]
CASES: dict[str, tuple[Refused, str, str, str]] = {
    "a matrix": (
        of(FIXED, q=FIXED.q[0, 0]),
        "q [2, 64]",
        "[batch, heads, seq_q, dim]",
        "cu_seqlens",
    ),
    "pages of three dimensions": (
        both(PAGED, lambda t: t[0]),
        "k [2, 16, 64]",
        "[pages, kv_heads, page, dim]",
        "page_table",
    ),
    "fp32": (of(FIXED, q=FIXED.q.float()), "q of torch.float32", "fp16 or bf16", ".to("),
    "two types": (both(FIXED, torch.Tensor.half), "k torch.float16", "the type of q", ".view("),
    "a cache of uint8": (
        both(BYTES, lambda t: t.view(torch.uint8)),
        "k torch.uint8",
        "both be float8_e4m3fn or both int8",
        ".view(torch.float8_e4m3fn)",
    ),
    "k and v of two types": (of(FIXED, v=BYTES.v), "v torch.float8", "the type of q", ".view("),
    "k and v differ": (
        of(FIXED, v=FIXED.v[:, :, :5]),
        "v [2, 2, 5, 64]",
        "one shape",
        ".transpose(1, 2)",
    ),
    "another dim": (of(FIXED, q=FIXED.q[..., :32]), "q [2, 4, 2, 32]", "dim of q", "transpose"),
    "dim 80": (
        lambda: warploom.attention_decode(*(torch.zeros(1, 1, 9, 80).half(),) * 3),
        "dim 80",
        "one of 64, 96, 128, 256",
        "warploom.attention",
    ),
    "heads": (of(FIXED, q=FIXED.q[:, :3]), "3 heads of q over 2", "multiple of", "consecutive"),
    "no kv heads": (both(FIXED, lambda t: t[:, :0]), "4 heads of q over 0", "multiple", "share"),
    "too many rows": (
        of(FIXED, q=torch.zeros(2, 4, 129, 64).bfloat16()),
        "129 query rows of 2 heads that share keys: 258",
        "at most 256",
        "warploom.attention",
    ),
    "too many packed rows": (
        of(PACKED, q=random(300, 4, 64), max_seqlen_q=129),
        "129 query rows of 2 heads that share keys: 258",
        "at most 256",
        "in parts",
    ),
    "another batch": (of(FIXED, q=FIXED.q[:1]), "for 1 sequences", "sequences of q", "page_table"),
    # Lengths, tables, offsets.
    "lengths of int64": (
        of(FIXED, cache_seqlens=torch.tensor([17, 40])),
        "cache_seqlens [2] torch.int64",
        "int32 [2]",
        ".int()",
    ),
    "lengths of another batch": (
        of(FIXED, cache_seqlens=ints(17)),
        "cache_seqlens [1]",
        "int32 [2]",
        "each",
    ),
    "a length for all": (
        of(FIXED, cache_seqlens=torch.tensor(17, dtype=torch.int32)),
        "cache_seqlens []",
        "int32 [2]",
        "each sequence",
    ),
    "lengths apart": (
        of(FIXED, cache_seqlens=ints(17, 0, 40, 0)[::2]),
        "strides [2]",
        "contiguous",
        "each sequence",
    ),
    "starts of another batch": (
        of(FIXED, cache_leftpad=ints(1)),
        "cache_leftpad [1]",
        "int32 [2]",
        "each",
    ),
    "a list of lengths": (
        of(FIXED, cache_seqlens=[17, 40]),
        "of type list",
        "torch tensor",
        "as_tensor",
    ),
    "lengths elsewhere": (
        of(FIXED, cache_seqlens=ints(17, 40).to("meta")),
        "cache_seqlens on meta",
        "must be on one device",
        "move",
    ),
    "a length below 0": (
        of(FIXED, cache_seqlens=ints(17, -1)),
        "[17, -1]",
        "0 and 40",
        "count the keys",
    ),
    "a length past the rows": (
        of(FIXED, cache_seqlens=ints(41, 2)),
        "[41, 2]",
        "0 and 40",
        "new ones",
    ),
    "a length past the table": (
        of(PAGED, cache_seqlens=ints(17, 49)),
        "[17, 49]",
        "0 and 48",
        "pages",
    ),
    "a table of int64": (
        of(PAGED, page_table=TABLE.long()),
        "page_table [2, 3] torch.int64",
        "int32 [2, pages of a sequence]",
        ".int()",
    ),
    "a table of one sequence": (of(PAGED, page_table=TABLE[:1]), "[1, 3]", "int32 [2", "slice"),
    "a flat table": (of(PAGED, page_table=TABLE.flatten()), "[6]", "int32 [2", "convert"),
    "a table turned": (
        of(PAGED, page_table=TABLE.t().contiguous().t()),
        "strides [1, 2]",
        "rows contiguous",
        "larger table",
    ),
    "a table elsewhere": (
        of(PAGED, page_table=TABLE.to("meta")),
        "page_table on meta",
        "one device",
        "move",
    ),
    "a page that is none": (
        of(PAGED, page_table=TABLE + 8),
        "in row 0 of page_table",
        "one of the cache's 8 pages, 0 to 7",
        "past a sequence's length",
    ),
    "a page below 0": (of(PAGED, page_table=TABLE - 8), "page -", "0 to 7", "past a"),
    "pages of 48 keys": (
        both(PAGED, lambda t: t.repeat(1, 1, 3, 1)),
        "pages of 48 keys",
        "of 16, 32, 64, 128, 256",
        ".transpose(1, 2)",
    ),
    "pages whose heads come last": (
        both(PAGED, lambda t: t.transpose(1, 2)),
        "pages of 2 keys",
        "[pages, kv_heads, page, dim]",
        ".transpose(1, 2)",
    ),
    "a negative bound": (of(FIXED, max_seqlen_k=-1), "max_seqlen_k -1", "at least 0", "int("),
    "a bound that is a tensor": (
        of(FIXED, max_seqlen_k=torch.tensor(40)),
        "max_seqlen_k <tensor []>",
        "no call waits",
        "int(",
    ),
    "packed queries without a bound": (
        of(PACKED, max_seqlen_q=None),
        "cu_seqlens_q alone",
        "cu_seqlens_q and max_seqlen_q",
        "no call waits",
    ),
    "a bound without packed queries": (
        of(FIXED, max_seqlen_q=2),
        "max_seqlen_q alone",
        "cu_seqlens_q and max_seqlen_q",
        "int",
    ),
    "packed queries of four dimensions": (
        of(PACKED, q=FIXED.q),
        "q [2, 4, 2, 64]",
        "[total, heads, dim]",
        "cu_seqlens",
    ),
    "offsets of int64": (
        of(PACKED, cu_seqlens_q=ends(2, 1).long()),
        "cu_seqlens_q [3] torch.int64",
        "int32 [batch + 1]",
        "begins with 0",
    ),
    "no offsets": (of(PACKED, cu_seqlens_q=ints()), "cu_seqlens_q [0]", "batch + 1", "begins"),
    "offsets that decrease": (
        of(PACKED, cu_seqlens_q=ints(0, 3, 2)),
        "cu_seqlens_q [0, 3, 2]",
        "never decrease",
        "cumulative",
    ),
    "more rows than were said": (
        of(PACKED, max_seqlen_q=1),
        "max_seqlen_q 1",
        "at least the longest sequence, 2",
        "largest",
    ),
    "packed keys beside lengths": (
        of(KEYS, cu_seqlens_k=ends(17, 23), cache_seqlens=ints(17, 23)),
        "cu_seqlens_k together with cache_seqlens",
        "must be passed alone",
        "leave it out",
    ),
    "packed keys of another batch": (
        of(KEYS, cu_seqlens_k=ends(40)),
        "cu_seqlens_k [2]",
        "int32 [3]",
        "cumulative",
    ),
    "packed keys past the rows": (
        of(KEYS, cu_seqlens_k=ends(17, 24)),
        "[0, 17, 41] over 40 rows",
        "end at no more",
        "cumulative",
    ),
    # Places.
    "a cache that TMA cannot read": (
        both(FIXED, spread),
        "strides [5200, 2600, 65, 1]",
        "multiples of 16 bytes",
        "never copied",
    ),
    "a cache that lies the other way": (
        both(FIXED, lambda t: t.mT.contiguous().mT),
        "strides [5120, 2560, 1, 40]",
        "last dimension is contiguous",
        "never copied",
    ),
    "a cache that is expanded": (
        both(FIXED, lambda t: t[:, :1].expand(2, 2, 40, 64)),
        "strides [5120, 0, 64, 1]",
        "not 0",
        "never copied",
    ),
    "a cache in the middle of 16 bytes": (
        both(
            FIXED,
            lambda t: t.flatten()[1 : 1 + 2 * 2 * 39 * 64].view(2, 2, 39, 64),
            cache_seqlens=None,
        ),
        "k at 0x",
        "its address",
        "allocate",
    ),
    # Scales and sinks.
    "int8 without scales": (
        of(WHOLE),
        "int8 caches without scale_k and scale_v",
        "must have both",
        "torch.ones",
    ),
    "one scale": (of(BYTES, scale_k=ONE), "e4m3 caches without scale_v", "both", "torch.ones"),
    "scales of a 16-bit cache": (
        of(FIXED, scale_k=ONE, scale_v=ONE),
        "scale_k and scale_v of bf16 caches",
        "only caches of e4m3 and int8",
        "`scale`",
    ),
    "scales of bf16": (
        of(BYTES, scale_k=HEADS.bfloat16(), scale_v=HEADS),
        "scale_k [2] torch.bfloat16",
        "float32",
        "indexed as the cache",
    ),
    "scales of three heads": (
        of(BYTES, scale_k=ONE, scale_v=torch.ones(3)),
        "scale_v [3]",
        "per head [2]",
        "without dim",
    ),
    "scales of other tokens": (
        of(BYTES, scale_k=TOKENS[..., :39], scale_v=TOKENS),
        "scale_k [2, 2, 39]",
        "[2, 2, 40]",
        "without dim",
    ),
    "a scale that is a number": (
        of(BYTES, scale_k=0.5, scale_v=0.5),
        "scale_k 0.5 of type float",
        "torch tensor",
        "as_tensor",
    ),
    "sinks of kv heads": (of(FIXED, sinks=torch.ones(2)), "sinks [2]", "must be [4]", "each head"),
    "sinks of another type": (
        of(FIXED, sinks=torch.ones(4).half()),
        "torch.float16",
        "float32 or torch.bfloat16",
        "each head",
    ),
    # What is computed.
    "causal by a name": (of(FIXED, causal="top_left"), "causal 'top_left'", "True or", "last key"),
    "batch_invariant of 1": (of(FIXED, batch_invariant=1), "batch_invariant 1", "True", "bool"),
    "return_lse of 1": (of(FIXED, return_lse=1), "return_lse 1", "True or False", "bool"),
    "window of -1": (of(FIXED, window=(-1, 3)), "(-1, 3)", "ints of at least 0", "None is no"),
    "window of one": (of(FIXED, window=128), "window 128", "(left, right)", "None is no bound"),
    "scale of 0": (of(FIXED, scale=0.0), "scale 0.0", "greater than 0", "negate q"),
    "softcap of nan": (of(FIXED, softcap=float("nan")), "softcap nan", "is finite", ""),
    "no tensor": (of(FIXED, q=None), "q None of type NoneType", "torch tensor", "as_tensor"),
    "spec of a number": (of(FIXED, spec=3), "spec 3", "KernelSpec or a kernel's name", "explain"),
    # Results.
    "out of another shape": (
        of(FIXED, out=torch.empty(2, 4, 3, 64).bfloat16()),
        "out [2, 4, 3, 64]",
        "[2, 4, 2, 64]",
        "out=None",
    ),
    "out over q": (of(FIXED, out=FIXED.q), "and q at", "does not overlap", "another out"),
    "out over the cache": (
        of(FIXED, out=FIXED.k.flatten()[: 2 * 4 * 2 * 64].view(2, 4, 2, 64)),
        "and k at",
        "does not overlap what is read",
        "another out",
    ),
    "a gradient of q": (
        of(FIXED, q=FIXED.q.clone().requires_grad_()),
        "tensors that require grad",
        "has no gradient",
        "warploom.attention",
    ),
    "a gradient of the cache": (
        of(FIXED, k=FIXED.k.clone().requires_grad_()),
        "tensors that require grad",
        "has no gradient",
        "no_grad",
    ),
    "a gradient of sinks": (
        of(FIXED, sinks=torch.ones(4).requires_grad_()),
        "tensors that require grad",
        "has no gradient",
        "no_grad",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_call_that_cannot_be_computed_says_why_and_what_to_do(case: str) -> None:
    call, value, rule, fix = CASES[case]
    before = warploom.counters.as_dict()
    for _ in range(2):
        with pytest.raises(ProblemError) as caught:
            call()
        assert value in caught.value.value
        assert rule in caught.value.rule
        assert fix in caught.value.fix
    assert warploom.counters.launches == before["launches"]


@pytest.mark.parametrize("case", ["lengths", "page_table", "gradient", "scale"])
def test_a_call_like_one_that_ran_is_refused_all_the_same(case: str) -> None:
    """What is kept of calls must not let a bad one through."""
    one = paged((17, 40))
    one.run()
    bad: dict[str, Refused] = {
        "lengths": of(one, cache_seqlens=ints(17, 49)),
        "page_table": of(one, page_table=one.keywords["page_table"] + 100),
        "gradient": of(one, q=one.q.clone().requires_grad_()),
        "scale": of(one, scale=-1.0),
    }
    with pytest.raises(ProblemError):
        bad[case]()


def test_a_gradient_is_no_matter_without_grad_mode() -> None:
    with torch.no_grad():
        of(FIXED, q=FIXED.q.clone().requires_grad_())()


@pytest.mark.parametrize(
    "keywords",
    [
        {"softcap": 1.0},
        {"sinks": torch.ones(4)},
        {"batch_invariant": True},
        {"cache_seqlens": None},
    ],
    ids=str,
)
def test_a_spec_of_another_operation_is_refused(keywords: dict[str, Any]) -> None:
    given = {**fixed((17, 40)).keywords, **keywords}
    q, k, v = (getattr(fixed((17, 40)), name) for name in "qkv")
    name = warploom.explain(warploom.attention_decode, q, k, v, **given).kernel
    assert name.startswith("attention_decode")
    warploom.attention_decode(q, k, v, spec=name, **given)
    with pytest.raises(ProblemError, match=r"computes another operation.*leave spec out"):
        of(fixed((17, 40), dim=128), spec=name)()
    with pytest.raises(ProblemError, match=r"computes another operation"):
        of(fixed((17, 40)), spec=name)()


def test_a_spec_of_a_wider_mask_serves_a_narrower_call() -> None:
    case = fixed((17, 40))
    given = (case.q, case.k, case.v)
    windowed = case.given(window=(3, None)).keywords
    name = warploom.explain(warploom.attention_decode, *given, **windowed).kernel
    assert "window" in name
    out = warploom.attention_decode(*given, spec=name, **case.keywords)
    assert torch.equal(out, case.run()[0])
