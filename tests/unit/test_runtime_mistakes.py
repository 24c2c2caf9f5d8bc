"""Arguments of the wrong kind are the user's mistake: a typed error, and no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import warploom
from warploom.errors import DeviceError, ProblemError

A, B = torch.randn(6, 16).bfloat16(), torch.randn(8, 16).bfloat16().t()
OUT = torch.empty(6, 8).bfloat16()
Q = torch.randn(1, 2, 6, 16).bfloat16()
PACKED = torch.randn(16, 2, 16).bfloat16()
ATTENTION = warploom.explain(warploom.plan_attention(Q, Q, Q)).kernel
Mistake = tuple[Callable[[], object], str]  # the call, and a pattern of the message


def gemm(a: Any = A, b: Any = B, **keywords: Any) -> Callable[[], object]:  # noqa: ANN401
    return lambda: warploom.gemm(a, b, **keywords)


def attention(q: Any = Q, k: Any = Q, **keywords: Any) -> Callable[[], object]:  # noqa: ANN401
    return lambda: warploom.attention(q, k, k, **keywords)


def packed(starts: Any, longest: Any = 16, **keywords: Any) -> Callable[[], object]:  # noqa: ANN401
    offsets = torch.tensor(starts, dtype=torch.int32) if isinstance(starts, list) else starts
    return attention(
        PACKED,
        PACKED,
        **{"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        | {"max_seqlen_q": longest, "max_seqlen_k": 16}
        | keywords,
    )


MISTAKES: dict[str, Mistake] = {
    "numbers": (gemm(1, 2), "a 1 of type int: must be a torch tensor"),
    "None": (gemm(None, B), "a None of type NoneType: must be a torch tensor"),
    "lists": (gemm([[1.0]], [[1.0]]), r"a \[\[1.0\]\] of type list: must be a torch tensor"),
    "numpy": (gemm(np.zeros((6, 16)), B), "of type ndarray: must be a torch tensor"),
    "numpy out": (gemm(out=np.zeros((6, 8))), "out .*ndarray: must be a torch tensor"),
    "sparse": (gemm(A.to_sparse()), "a, a sparse tensor .*: must be dense and strided"),
    "sparse csr": (lambda: warploom.gemm(A.float().to_sparse_csr(), B), "a, a sparse tensor"),
    "nested": (
        lambda: warploom.gemm(torch.nested.nested_tensor([A, A]), B),
        "a, a nested tensor",
    ),
    "jagged": (
        lambda: warploom.attention(
            torch.nested.nested_tensor([Q[0], Q[0]], layout=torch.jagged), Q, Q
        ),
        "q, a nested tensor",
    ),
    "sparse bias": (gemm(bias=torch.ones(8).to_sparse()), "bias, a sparse tensor"),
    "func.grad": (
        lambda: torch.func.grad(lambda x: warploom.gemm(x, B).float().sum())(A),
        "torch.func's grad: must be called outside",
    ),
    "func.jvp": (
        lambda: torch.func.jvp(lambda x: warploom.attention(x, Q, Q), (Q,), (Q,)),
        "warploom.attention has no forward-mode derivative",
    ),
    "jit.trace": (
        lambda: torch.jit.trace(lambda x: warploom.gemm(x, B), (A,)),
        "under torch.jit.trace: must be traced by torch.compile",
    ),
    "spec of attention": (gemm(spec=ATTENTION), "must be a kernel of gemm, not of attention_forw"),
    "spec number": (gemm(spec=3), "spec 3 of type int: must be a KernelSpec or a kernel's name"),
    "spec number of attention": (attention(spec=3), "spec 3 of type int: must be a KernelSpec"),
    "epilogue of dicts": (
        gemm(epilogue=[{"kind": "bias"}]),
        "epilogue item {'kind': 'bias'}: an i",
    ),
    "epilogue of None": (gemm(epilogue=[None]), "epilogue item None: an item is"),
    "epilogue text": (gemm(epilogue="gelu"), "epilogue 'gelu' of type str: must be a list of it"),
    "epilogue generator": (
        gemm(epilogue=(item for item in [("activation", "relu")])),
        "of type generator: must be a list of items",
    ),
    "scale text": (gemm(scale_a="1"), "scale_a '1': must be a tensor, or"),
    "scale bool": (gemm(scale_a=True), "scale_a True: must be a tensor, or"),
    "scale nan": (gemm(scale_b=float("nan")), "scale_b nan: must be a finite number"),
    "scale inf": (gemm(scale_d=float("inf")), "scale_d inf: must be a finite number"),
    "scale list": (gemm(scale_a=[1.0]), r"scale_a \[1.0\]: must be a tensor, or"),
    "long bias": (
        gemm(bias=[1.0] * 384),
        r"bias \[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ...\]: must be a te",
    ),
    "beta alone": (gemm(beta=2.0), "beta 2.0 without residual: must come with the residual"),
    "out_dtype text": (gemm(out_dtype="bf16"), "out_dtype 'bf16': must be a torch.dtype"),
    "float64": (gemm(A.double(), B.double()), "of operands are fp16, bf16, e4m3, e5m2, int8"),
    "window number": (attention(window=128), r"window 128: must be \(left, right\)"),
    "causal number": (attention(causal=1), "causal 1: must be False, True"),
    "softcap text": (attention(softcap="3"), "softcap '3': softcap is finite and greater than 0"),
    "scale text of attention": (attention(scale="1"), "scale '1': scale is finite"),
    "scale bool of attention": (attention(scale=True), "scale True: scale is finite"),
    "q list": (attention([1.0]), r"q \[1.0\] of type list: must be a torch tensor"),
    "deterministic": (
        attention(deterministic="yes"),
        "deterministic 'yes': must be True",
    ),
    "return_lse": (attention(return_lse="no"), "return_lse 'no': must be True or False"),
    "backward_spec": (attention(Q.clone().requires_grad_(), backward_spec=3), "spec 3 of type int"),
    "cu_seqlens list": (packed(torch.int32, cu_seqlens_q=[0, 16]), "cu_seqlens_q .* of type list"),
    "cu_seqlens past the end": (packed([0, 5, 99]), r"cu_seqlens_q \[0, 5, 99\] over 16 rows"),
    "cu_seqlens decrease": (packed([0, 9, 5, 16]), "must begin with 0, never decrease"),
    "cu_seqlens negative": (packed([-4, 5, 16]), "must begin with 0"),
    "cu_seqlens not from 0": (packed([1, 5, 16]), "must begin with 0"),
    "max_seqlen too small": (
        packed([0, 11, 16], 10),
        "q 10: must be at least the longest",
    ),
    "max_seqlen float": (packed([0, 11, 16], 11.0), "max_seqlen_q 11.0: must be an int"),
    "explain None": (lambda: warploom.explain(None), "explain of None alone"),
    "explain a module": (
        lambda: warploom.explain(warploom.nn.GatedMLP(64, 96), A, gpu="h200"),
        "explain of a GatedMLP: must be of a layer of one call.*gate_proj, up_proj, down_proj",
    ),
    "explain one": (lambda: warploom.explain(A), "must be of a plan, of a and b, or of q, k and v"),
    "plan of lists": (lambda: warploom.plan([1.0], B), r"a \[1.0\] of type list"),
    "plan_attention": (lambda: warploom.plan_attention(Q, 3, Q), "k 3 of type int"),
    "planned call": (lambda: warploom.plan(A, B)([1.0], B), r"a \[1.0\] of type list"),
    "planned attention": (lambda: warploom.plan_attention(Q, Q, Q)(Q, None, Q), "k None of type"),
    "warmup None": (lambda: warploom.warmup(None), "path None of type NoneType: must be the path"),
    "load number": (lambda: warploom.load(3), "spec 3 of type int"),
}


@pytest.mark.parametrize("case", MISTAKES)
@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes: sparse, nested, jit
def test_a_mistake_is_told_as_one(case: str) -> None:
    call, said = MISTAKES[case]
    warploom.gemm(A, B), warploom.gemm(A, B, scale_a=1.0), warploom.attention(Q, Q, Q)  # are warm
    with pytest.raises(ProblemError, match=said) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is None
    context = caught.value.__context__
    assert caught.value.__suppress_context__ or context in (None, caught.value)


def test_a_softcap_of_0_is_none() -> None:
    assert torch.equal(warploom.attention(Q, Q, Q, softcap=0.0), warploom.attention(Q, Q, Q))
    kernel = warploom.explain(warploom.plan_attention(Q, Q, Q, softcap=0)).kernel
    assert "softcap" not in kernel


def test_offsets_that_are_right_are_taken() -> None:
    for starts in ([0, 16], [0, 5, 5, 11], [0]):
        packed(starts)()


def test_loading_takes_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeviceError, match="no CUDA device here"):
        warploom.load(warploom.explain(A, B).kernel)
