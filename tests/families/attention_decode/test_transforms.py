"""What would not see a decoding kernel's launch is refused, also where a like call ran before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_calls import fixed

import warploom
from warploom.errors import ProblemError

Refused = Callable[[], object]


def transformed(transform: Callable[..., Any]) -> Refused:
    case = fixed((17, 40))

    def decoded(q: torch.Tensor) -> torch.Tensor:
        return warploom.attention_decode(q, case.k, case.v, **case.keywords)

    return lambda: transform(decoded, case.q)


TRANSFORMS: dict[str, tuple[Refused, str]] = {
    "grad": (
        transformed(lambda f, q: torch.func.grad(lambda x: f(x).float().sum())(q)),
        "torch.func's grad: must be called outside",
    ),
    "vmap": (
        transformed(lambda f, q: torch.func.vmap(f)(q.expand(3, *q.shape))),
        "torch.func's vmap: must be called outside",
    ),
    "jvp": (
        transformed(lambda f, q: torch.func.jvp(f, (q,), (q,))),
        "warploom.attention_decode has no forward-mode derivative",
    ),
    "trace": (
        transformed(lambda f, q: torch.jit.trace(f, (q,))),
        "under torch.jit.trace: must be traced by torch.compile",
    ),
    "sparse": (transformed(lambda f, q: f(q.to_sparse())), "q, a sparse tensor"),
    "nested": (
        transformed(lambda f, q: f(torch.nested.nested_tensor(list(q)))),
        "q, a nested tensor .*packed queries",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_would_not_see_the_launch_is_refused(name: str, warm: bool) -> None:
    call, message = TRANSFORMS[name]
    if warm:
        for _ in range(2):
            fixed((17, 40)).run()
    with pytest.raises(ProblemError, match=message):
        call()
