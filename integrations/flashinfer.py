"""FlashInfer's wrapper of batch decode, computed by `warploom.attention_decode`.

Names, arguments, layouts and results are those of FlashInfer 0.6: pages in NHD or HND, plans that
many layers run by, log-sum-exps in base 2. Nothing is divided on the host: a plan is a page table
and lengths, both on the GPU, so that a captured graph runs by whatever was planned last.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.integrations.flashinfer_plan import (
    LAYOUTS,
    Pages,
    Pair,
    Planned,
    Type,
    caches,
    fixed,
    number,
    pages,
    refuse,
    require_integers,
    type_of,
)
from warploom.runtime.families.attention_decode.api import attention_decode
from warploom.runtime.tensors import shown

_BASE_2 = math.log2(math.e)


class BatchDecodeWithPagedKVCacheWrapper:
    """Attention of one query row, or a few, of each sequence to a cache in pages.

    float_workspace_buffer   says which device; its memory is not used
    kv_layout                "NHD": pages [page, kv_heads, dim]; "HND": [kv_heads, page, dim]
    use_cuda_graph           plans keep their place in memory, for a batch of the size that
                             paged_kv_last_page_len_buffer has, and up to the pages that
                             paged_kv_indices_buffer has space for
    use_tensor_cores, backend  are ignored: every kernel here uses tensor cores
    jit_args                 must be None
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        if not isinstance(float_workspace_buffer, torch.Tensor):
            raise ProblemError(
                f"float_workspace_buffer {shown(float_workspace_buffer)}",
                rule="must be a tensor: its device is the wrapper's",
                fix="torch.empty(0, device=...)",
            )
        if not isinstance(kv_layout, str) or kv_layout not in LAYOUTS:
            raise ProblemError(
                f"kv_layout {shown(kv_layout)}", rule='must be "NHD" or "HND"', fix=""
            )
        require_boolean("use_cuda_graph", use_cuda_graph)
        require_boolean("use_tensor_cores", use_tensor_cores)
        if jit_args is not None:
            refuse(jit_args=jit_args)
        self.device = float_workspace_buffer.device
        self.use_tensor_cores = True
        self._layout = kv_layout
        self._planned: Planned | None = None
        self._pages: Pages | None = None
        self._fixed: Pages | None = None
        if use_cuda_graph:
            buffers = {
                "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
                "paged_kv_indices_buffer": paged_kv_indices_buffer,
                "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
            }
            self._fixed = fixed(buffers, self.device)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans keep their place in memory."""
        return self._fixed is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take other buffers, whose memory is not used either."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Type | None = "float16",
        kv_data_type: Type | None = None,
        o_data_type: Type | None = None,
        data_type: Type | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Say which pages the sequences have, and what `run` computes, until the next plan.

        indptr          int32 [batch + 1]: sequence i has indices indptr[i] to indptr[i + 1]
        indices         int32: numbers of pages in the cache
        last_page_len   int32 [batch]: how many rows of its last page a sequence has
        window_left     how many keys before its own a row attends to; -1: all
        logits_soft_cap scores become cap tanh(score / cap); None or 0 is none
        q_data_type, kv_data_type  fp16 or bf16, and the cache that or e4m3
        sm_scale        of the scores; None is head_dim ** -0.5
        fixed_split_size, disable_split_kv  a sequence's bits do not depend on its neighbours
        q_len_per_req   rows of each sequence; its last one stands at its last key

        Lists may be anywhere; as FlashInfer does, this waits for indptr. `seq_lens` and
        `block_tables` say again what the others do, and are ignored, as are rope_scale and
        rope_theta without a pos_encoding_mode. Raises ProblemError.
        """
        if pos_encoding_mode != "NONE":
            refuse(pos_encoding_mode=pos_encoding_mode)
        require_integers(window_right=window_right)
        if fixed_split_size is not None:
            require_integers(1, fixed_split_size=fixed_split_size)
        if window_right != 0:
            refuse(window_right=window_right)
        require_boolean("disable_split_kv", disable_split_kv)
        require_boolean("non_blocking", non_blocking)
        require_integers(window_left=window_left)
        require_integers(
            1,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_len_per_req=q_len_per_req,
        )
        softcap = None if logits_soft_cap is None else number("logits_soft_cap", logits_soft_cap)
        element = type_of("q_data_type", data_type if q_data_type is None else q_data_type)  # type: ignore[arg-type]
        kv = kv_data_type if kv_data_type is not None else data_type
        if o_data_type is not None and type_of("o_data_type", o_data_type) != element:
            refuse(o_data_type=o_data_type)
        planned = Planned(
            heads=num_qo_heads,
            kv_heads=num_kv_heads,
            dim=head_dim,
            page=page_size,
            rows=q_len_per_req,
            window=window_left if window_left >= 0 else None,
            logits_soft_cap=softcap or None,
            scale=head_dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale),
            element=element,
            kv=element if kv is None else type_of("kv_data_type", kv),
            invariant=fixed_split_size is not None or disable_split_kv,
        )
        planned.check()
        found = pages(
            *(indptr, indices, last_page_len, page_size, self.device), rounded=self._fixed is None
        )
        if self._fixed is not None:
            self._check_frozen(found, planned)
            self._fixed.take(found)
            found = self._fixed
        self._planned, self._pages = planned, found

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | Pair,
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: object = None,
    ) -> torch.Tensor | Pair:
        """Return the attention of q [batch * q_len_per_req, heads, dim], as planned.

        paged_kv_cache  (k, v), each [pages, page, kv_heads, dim] (NHD) or [pages, kv_heads, page,
                        dim] (HND); or one tensor of both, [pages, 2, ..]
        q_scale, k_scale, v_scale  numbers that q, keys and values are multiplied by
        sinks           [heads]: one more score of each row, with no value
        out, lse        where results go
        return_lse      also return the log-sum-exp of each row's scores: fp32
                        [batch * q_len_per_req, heads], in base 2; -inf for a row without keys

        `enable_pdl` is ignored: launches always begin early. Can be captured by a CUDA graph once
        a call like it has run. Raises ProblemError before anything is launched.
        """
        if args:
            refuse(args=args)
        if type(return_lse) is not bool:
            require_boolean("return_lse", return_lse)
        if skip_softmax_threshold_scale_factor is not None:
            refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if kv_cache_sf is not None:
            refuse(kv_cache_sf=kv_cache_sf)
        for name, one in (("out", out), ("lse", lse)):
            if one is not None and not isinstance(one, torch.Tensor):
                raise ProblemError(f"{name} {shown(one)}", rule="must be a torch tensor", fix="")
        planned, listed = self._ready(q, window_left, q_len_per_req)
        k, v = caches(paged_kv_cache, self._layout, planned)
        scale = planned.scale * number("q_scale", q_scale) * number("k_scale", k_scale)
        factor = number("v_scale", v_scale)
        by_sequence = (listed.lengths.shape[0], planned.rows, planned.heads, planned.dim)
        if out is not None and out.shape != q.shape:
            raise ProblemError(
                f"out {list(out.shape)}", rule=f"must be {list(q.shape)}, as q", fix=""
            )
        found, natural = attention_decode(
            q.view(by_sequence).transpose(1, 2),
            k,
            v,
            cache_seqlens=listed.lengths,
            page_table=listed.table,
            causal=planned.rows > 1,
            window=None if planned.window is None else (planned.window, None),
            softcap=planned.logits_soft_cap,
            scale=scale,
            sinks=sinks,
            batch_invariant=planned.invariant,
            return_lse=True,
            out=None if out is None else out.view(by_sequence).transpose(1, 2),
        )
        result = found.transpose(1, 2).flatten(0, 1) if out is None else out
        if factor != 1:
            result *= factor
        if not return_lse:
            return result
        return result, torch.mul(natural.transpose(1, 2).flatten(0, 1), _BASE_2, out=lse)

    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor | Pair, **keywords: Any
    ) -> Pair:
        """Return out and its log-sum-exp, as `run` does when it is asked for both."""
        pair = self.run(q, paged_kv_cache, **{**keywords, "return_lse": True})
        assert isinstance(pair, tuple)  # noqa: S101, since it was asked for
        return pair

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer."""

    # ---- What was planned, and is given ----------------------------------------------------------

    def _check_frozen(self, found: Pages, planned: Planned) -> None:
        """Raise ProblemError for another batch or other rows than those that graphs are of."""
        assert self._fixed is not None  # noqa: S101
        batch, frozen = found.table.shape[0], self._fixed.table.shape[0]
        rows = planned.rows if self._planned is None else self._planned.rows
        if (batch, planned.rows) != (frozen, rows):
            raise ProblemError(
                f"a plan of {batch} sequences, {planned.rows} rows each, for CUDA graphs",
                rule=f"must be of {frozen} sequences, {rows} rows each: graphs keep their sizes",
                fix="make a wrapper for each size",
            )

    def _ready(
        self, q: torch.Tensor, window_left: int | None, rows: int | None
    ) -> tuple[Planned, Pages]:
        """What was planned; ProblemError where q is of something else."""
        planned, listed = self._planned, self._pages
        if planned is None or listed is None:
            raise ProblemError(
                "run before plan",
                rule="must come after plan, which takes the pages of the sequences",
                fix="call plan",
            )
        planned.check_run(q, listed.lengths.shape[0], window_left, rows)
        return planned, listed


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same, made for CUDA graphs: see `use_cuda_graph`."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
