"""A call of `warploom.attention` on q and k of 8 bits: its arguments, and what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypedDict

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.families.attention_forward import AttentionOperation, AttentionProblem
from warploom.generator.families.attention_forward.launch import padded_total
from warploom.generator.families.attention_forward.rules import (
    DIMS_OF_EIGHT,
    KEYS_OF_A_SCALE,
    usual_sums,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import Operation
from warploom.runtime import arguments as calls
from warploom.runtime import dispatch
from warploom.runtime.arguments import declared, option, tensor
from warploom.runtime.counters import counters
from warploom.runtime.dispatch import Choice
from warploom.runtime.elements import NAMES
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import Band, operation, shape
from warploom.runtime.families._attention.modifiers.modifier import Fields
from warploom.runtime.families._attention.operands import copied, ordered_strides
from warploom.runtime.families._attention.problem import Arguments, Extents
from warploom.runtime.families.attention_forward import eight_bit_reference, values
from warploom.runtime.families.attention_forward.call import AttentionCall, Details, Pair
from warploom.runtime.families.attention_quantize.api import transpose_values
from warploom.runtime.tensors import require_one_device, shown

SCORED = (torch.float8_e4m3fn, torch.int8)
OUTPUTS = (torch.bfloat16, torch.float16)
ValueLayout = Literal["keys", "dim_major"]
Sums = Literal["promoted", "fast"]


class EightBitKeywords(TypedDict, total=False):
    """What a call on 8 bits is given beside what any other is (see `warploom.attention`)."""

    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    v_layout: ValueLayout
    sums: Sums | None
    out_dtype: torch.dtype | None


_KEYWORDS = EightBitKeywords.__annotations__.keys()


def call_of(*operands: Any, **keywords: Any) -> AttentionCall:
    """The call of `warploom.attention` with these arguments: of 8 bits or of 16."""
    own = {name: keywords.pop(name) for name in _KEYWORDS if name in keywords}
    if own.get("v_layout") == "keys":
        del own["v_layout"]  # as it is by default
    if any(one is not None for one in own.values()):
        return EightBitCall(*operands, **keywords | own)
    return AttentionCall(*operands, **keywords)


def _scale() -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare what an operand is multiplied by."""
    return tensor(default=None, schema="Tensor?=None", aligned=False)


@declared
class EightBitCall(AttentionCall):
    """The arguments of a call on q and k of 8 bits, and v of e4m3 or 16 bits."""

    no_gradient: ClassVar[tuple[str, str, str]] = (
        "q, k, v or a scale that requires grad",
        "attention of 8 bits is not differentiable",
        "call it under torch.no_grad(), or differentiate warploom.attention of what was quantized",
    )

    q_descale: torch.Tensor | None = _scale()
    k_descale: torch.Tensor | None = _scale()
    v_descale: torch.Tensor | None = _scale()
    v_layout: ValueLayout = option(default="keys", schema='str="keys"')
    sums: Sums | None = option(default=None, schema="str?=None")
    out_dtype: torch.dtype | None = option(default=None, schema="ScalarType?=None")

    def __post_init__(self) -> None:
        """A tensor for the output says its type, which operators are told."""
        AttentionCall.__post_init__(self)
        if self.out_dtype is None and isinstance(self.out, torch.Tensor):
            self.out_dtype = self.out.dtype

    # ---- What its arguments say ------------------------------------------------------------------

    @property
    def result_dtype(self) -> torch.dtype:
        """The type of the output: as it is named, or that of v, or bf16."""
        if self.out_dtype is not None:
            return self.out_dtype
        return self.v.dtype if self.v.dtype in OUTPUTS else torch.bfloat16

    @property
    def values_shape(self) -> torch.Size:
        """The shape of v by keys and dim."""
        return self.k.shape if self._is_dim_major else self.v.shape

    @property
    def _is_dim_major(self) -> bool:
        return self.v_layout == "dim_major"

    @property
    def _lies_by_keys(self) -> bool:
        """Whether v is laid out anew before kernels read it."""
        return self.v.dtype == torch.float8_e4m3fn and not self._is_dim_major

    @property
    def weights(self) -> str:
        """Of which type the softmax's weights are: of that of v."""
        return "e4m3" if self.v.dtype == torch.float8_e4m3fn else "same"

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        for name, words in (("v_layout", ("keys", "dim_major")), ("sums", ("promoted", "fast"))):
            value = getattr(self, name)
            if value not in words and not (name == "sums" and value is None):
                raise ProblemError(
                    f"{name} {shown(value)}", rule=f"must be one of {', '.join(words)}", fix=""
                )
        if self.out_dtype is not None:
            require_dtype("out_dtype", self.out_dtype, OUTPUTS)

    def check_elements(self) -> None:
        """Raise ProblemError for types that no kernel has, and for a v that lies otherwise."""
        q, k, v = self.q, self.k, self.v
        if q.dtype not in SCORED or k.dtype != q.dtype:
            raise ProblemError(
                f"q {q.dtype}, k {k.dtype} with scales",
                rule="must both be e4m3 (torch.float8_e4m3fn), or both int8",
                fix="quantize them with warploom.attention_quantize; operands of 16 bits have no "
                "q_descale, k_descale and v_descale",
            )
        if v.dtype not in (torch.float8_e4m3fn, *OUTPUTS):
            raise ProblemError(
                f"v {v.dtype}",
                rule="must be e4m3 (torch.float8_e4m3fn), or bf16 or fp16 for exact weights",
                fix="quantize it with warploom.attention_quantize",
            )
        if v.dtype in OUTPUTS and self.result_dtype != v.dtype:
            raise ProblemError(
                f"out of {self.result_dtype} with v of {v.dtype}",
                rule="the output has the type of v, where that is of 16 bits",
                fix="leave out_dtype out",
            )
        if self.result_dtype not in OUTPUTS:
            raise ProblemError(
                f"out of {self.result_dtype}", rule="must be of bf16 or fp16", fix="leave it out"
            )
        if q.shape[-1] % values.GROUP:
            raise ProblemError(
                f"dim {q.shape[-1]} of q of {q.dtype}",
                rule=f"a head dimension of 8-bit numbers must be a multiple of {values.GROUP}",
                fix="pad q, k and v with zeros, and pass the scale of the true dimension",
            )
        given = [(name, one) for name, one in self.read() if name not in self.further]
        require_one_device(given)
        if self._is_dim_major:
            self._check_dim_major()

    def _check_dim_major(self) -> None:
        k, v = self.k, self.v
        if v.dtype != torch.float8_e4m3fn:
            raise ProblemError(
                f'v_layout "dim_major" with v of {v.dtype}',
                rule="is of v of e4m3",
                fix="leave v_layout out",
            )
        if self.offsets:
            total, sequences = k.shape[0], self.offsets[0].shape[0] - 1
            least, kv_heads = padded_total(total, sequences), k.shape[1]
            fits = v.shape[:2] == (kv_heads, k.shape[2]) and v.shape[2] >= least
            wanted = f"[{kv_heads}, {k.shape[2]}, at least {least}]"
        else:
            keys = k.shape[2]
            least = -(-keys // values.GROUP) * values.GROUP
            fits = v.shape[:3] == (*k.shape[:2], k.shape[3]) and v.shape[3] >= least
            wanted = f"[{k.shape[0]}, {k.shape[1]}, {k.shape[3]}, at least {least}]"
        if not fits:
            raise ProblemError(
                f'v {list(v.shape)} with v_layout "dim_major"',
                rule=f"must be {wanted}: of each index of the head dimension all keys",
                fix="take v of warploom.attention_quantize, or leave v_layout out",
            )

    # ---- Its kernel ------------------------------------------------------------------------------

    def unreadable(self) -> tuple[str, ...]:
        """Those of q, k and v that are copied first: v also where it is to be laid out anew."""
        names = AttentionCall.unreadable(self)
        if self._lies_by_keys and "v" not in names:
            names += ("v",)
        return names

    def _choice(
        self, sizes: Extents, masked: Band, target: DeviceLimits, further: Fields
    ) -> Choice:
        if sizes.dim_v:
            raise ProblemError(
                f"v of dim {sizes.dim_v} with q of {self.q.dtype} and dim {sizes.dim}",
                rule="no kernel of 8 bits has v of another dimension than q and k",
                fix="pad the smaller one with zeros, or give operands of 16 bits",
            )
        by_blocks = self._check_scales(sizes)
        fields = {
            **further,
            "scores": NAMES[self.q.dtype],
            "weights": self.weights,
            "sums": self.sums or usual_sums(self.weights, sizes.dim),
            "scales": "blocks" if by_blocks else "heads",
        }
        dims = next(dim for dim in DIMS_OF_EIGHT if dim >= sizes.dim), 0
        element = NAMES[self.result_dtype]
        wanted = operation(AttentionOperation, element, sizes, dims, masked, fields)
        return dispatch.choose(wanted, shape(sizes, masked), spec=self.kernel, device=target)

    def _check_scales(self, sizes: Extents) -> bool:
        """Raise ProblemError for scales of other shapes; whether there are those of blocks."""
        by_heads = (sizes.batch, sizes.kv_heads)
        finer: Mapping[str, tuple[int, ...]] = {}
        if not sizes.packed:
            blocks = -(-sizes.seq_k // KEYS_OF_A_SCALE)
            finer = {
                "q_descale": (sizes.batch, sizes.heads, sizes.seq_q),
                "k_descale": (sizes.batch, sizes.kv_heads, blocks),
            }
        for name in ("q_descale", "k_descale", "v_descale"):
            scale: torch.Tensor | None = getattr(self, name)
            if name == "v_descale" and self.weights == "same":
                if scale is not None:
                    raise ProblemError(
                        f"v_descale with v of {self.v.dtype}",
                        rule="is of v of e4m3",
                        fix="multiply v",
                    )
                continue
            if scale is None:
                raise ProblemError(
                    f"q of {self.q.dtype} without {name}",
                    rule="operands of 8 bits come with q_descale, k_descale and, of v, v_descale",
                    fix="torch.ones((), device=q.device).expand(batch, kv_heads) multiplies by 1",
                )
            shapes = [by_heads, *([finer[name]] if name in finer else ())]
            if scale.dtype != torch.float32 or tuple(scale.shape) not in shapes:
                raise ProblemError(
                    f"{name} {list(scale.shape)} {scale.dtype}",
                    rule=f"must be fp32 {' or '.join(str(list(one)) for one in shapes)}",
                    fix="one of each kv head"
                    + (", of each row of q or of each 128 keys" if name in finer else ""),
                )
        tensors = (self.q_descale, self.k_descale)
        return any(one is not None and one.dim() == 3 for one in tensors)

    def _problem(self, details: Details, wanted: Operation) -> AttentionProblem:
        sizes, problem = details.sizes, AttentionCall._problem(self, details, wanted)
        v = self.v
        if self._lies_by_keys:
            v = torch.empty(self._laid_out_shape(sizes), dtype=v.dtype, device="meta")
        elif "v" in details.copies:
            v = torch.empty(v.shape, dtype=v.dtype, device="meta")
        own: dict[str, Any] = {}
        if self.weights == "e4m3":
            batch, head, dim, _ = (0, *v.stride()) if sizes.packed else v.stride()
            own["strides_v"] = (batch, head, dim)
        of_heads = tuple(self.q_descale.shape) == (sizes.batch, sizes.kv_heads)  # type: ignore[union-attr]
        own["q_descale_sharing"] = sizes.sharing if of_heads else 1
        for name in ("q_descale", "k_descale", "v_descale"):
            if (scale := getattr(self, name)) is not None:
                own[f"strides_{name}"] = (*scale.stride(), 0)[:3]
        return replace(problem, **own)  # type: ignore[return-value]

    def _laid_out_shape(self, sizes: Extents) -> tuple[int, ...]:
        if sizes.packed:
            keys = padded_total(sizes.total_k, sizes.batch)
            return (sizes.kv_heads, sizes.dim, keys)
        keys = -(-sizes.seq_k // KEYS_OF_A_SCALE) * KEYS_OF_A_SCALE
        return (sizes.batch, sizes.kv_heads, sizes.dim, keys)

    # ---- What is done with it --------------------------------------------------------------------

    def refuse(self) -> None:
        """Raise ProblemError for tensors that autograd expects to see differentiated."""
        calls.Arguments.refuse(self)

    def results(self, details: Details) -> Pair:
        """Out, as it was given or new, and a new lse."""
        q, out = self.q, self.out
        if out is None:
            out = q.new_empty_strided(q.shape, details.out_strides, dtype=self.result_dtype)
        return out, q.new_empty(details.lse_shape, dtype=torch.float32)

    def copied(self, details: Details) -> EightBitCall:
        """The same call, of copies of what TMA cannot read, and of v as kernels read it."""
        call, names = self, details.copies
        if self._lies_by_keys:
            counters.add("copies")
            laid_out = transpose_values(self.v, self.cu_seqlens_k)
            call = replace(self, v=laid_out, v_layout="dim_major")
            names = tuple(name for name in names if name != "v")
        return copied(call, names)

    def fake(self) -> Pair:
        """Both, of a call whose tensors fit each other."""
        q = self.q
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
        out = q.new_empty_strided(q.shape, ordered_strides(q), dtype=self.result_dtype)
        return out, q.new_empty(shape, dtype=torch.float32)

    def dequantized(self) -> Arguments:
        """The same call of fp32: of what the numbers of 8 bits stand for, and v by keys."""
        rest = {
            name: getattr(self, name)
            for name in Arguments.declaration.names
            if name not in ("q", "k", "v", "out", "spec")
        }
        q, k = (self._multiplied(name) for name in ("q", "k"))
        return Arguments(q, k, self._values(), **rest)

    def _multiplied(self, name: str) -> torch.Tensor:
        numbers: torch.Tensor = getattr(self, name).float()
        scale: torch.Tensor = getattr(self, f"{name}_descale")
        heads = numbers.shape[-2] if self.offsets else numbers.shape[1]
        if scale.dim() == 3 and name == "k":  # of 128 keys
            scale = scale.repeat_interleave(KEYS_OF_A_SCALE, 2)[..., : numbers.shape[2]]
        elif scale.dim() == 2:
            scale = scale.repeat_interleave(heads // max(1, scale.shape[1]), 1)
            if self.offsets:
                return numbers * self._of_tokens(scale, name)[..., None]
            scale = scale[..., None]
        return numbers * scale[..., None]

    def _of_tokens(self, scale: torch.Tensor, name: str) -> torch.Tensor:
        """Scales [sequences, heads] as those of packed rows, [total, heads]."""
        offsets = self.offsets[0 if name == "q" else 1]
        row = torch.arange(getattr(self, name).shape[0], device=offsets.device)
        index = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
        return scale[index.clamp(max=scale.shape[0] - 1)]

    def _values(self) -> torch.Tensor:
        v, scale = self.v, self.v_descale
        if scale is None:
            return v.float()
        if not self.offsets:
            by_keys = values.by_keys(v, self.k.shape[2]) if self._is_dim_major else v
            return by_keys.float() * scale[..., None, None]
        by_keys = v
        if self._is_dim_major and self.cu_seqlens_k is not None:
            by_keys = values.packed_by_keys(v, self.cu_seqlens_k, self.k.shape[0])
        return by_keys.float() * self._of_tokens(scale, "k")[..., None]

    def computed_by_torch(self, band: Band) -> Pair:
        """Out and lse by the reference, which rounds weights as kernels do."""
        compute = eight_bit_reference.rounded(self.weights)
        return reference.of_call(self.dequantized(), band, compute)
