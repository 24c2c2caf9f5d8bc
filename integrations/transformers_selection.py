"""Keys that a layer of transformers' models chooses for each row, as those of DeepSeek-V3.2 do.

For its own "eager" and "sdpa" a layer masks what it did not choose. Any other attention gets the
choice as a keyword beside the mask, and without it would attend to every key: here it becomes part
of the mask, as a tensor.

indices        [batch, rows, chosen]: keys, of all heads (DeepSeek-V3.2, GLM-MoE-DSA)
block_indices  [batch, groups of heads, rows, chosen]: blocks of keys, -1 where there are less; the
               layer's `indexer` says which keys a block has (MiniMax-M3)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from warploom.errors import ProblemError
from warploom.integrations.transformers_masks import BoundedMask

KEYWORDS = ("indices", "block_indices")
Mask = torch.Tensor | BoundedMask | None


def selects(keywords: Mapping[str, Any]) -> bool:
    """Whether the keywords of an attention have a choice of keys.

    Raises ProblemError for one by a name that is not known: to ignore it would be to attend to all.
    """
    names = [
        name
        for name, value in keywords.items()
        if name.endswith("indices") and isinstance(value, torch.Tensor)
    ]
    if unknown := [name for name in names if name not in KEYWORDS]:
        raise ProblemError(
            f'attn_implementation="warploom" with {unknown[0]} '
            f"{list(keywords[unknown[0]].shape)}, by which the model selects keys",
            rule=f"must be {' or '.join(KEYWORDS)}: what others mean is not known",
            fix='model.set_attn_implementation("sdpa")',
        )
    return bool(names)


def masked(
    module: Any,  # noqa: ANN401 (a layer of transformers)
    query: torch.Tensor,
    keys: int,
    attention_mask: Mask,
    keywords: Mapping[str, Any],
    *,
    causal: bool,
) -> torch.Tensor:
    """Return the mask [batch, 1 or heads, rows, keys] of what is chosen and not masked.

    It is bool, or added to scores where the mask that is given is, or the layer makes it so. No
    mask: rows are the first of a causal layer's, and see no later key.
    """
    mask = attention_mask.tensor() if isinstance(attention_mask, BoundedMask) else attention_mask
    rows = query.shape[2]
    blocks = keywords.get("block_indices")
    if blocks is not None:
        positions = keywords.get("position_ids")
        if positions is None:  # which only tell what is causal where there is no mask
            positions = torch.arange(rows, device=query.device) + (keys - 1 if rows == 1 else 0)
        made: torch.Tensor = module.indexer.build_block_mask(
            blocks, mask, keys, query.dtype, query.device, positions.expand(query.shape[0], -1)
        )
        return made
    indices = keywords["indices"].long()
    chosen = torch.zeros((*indices.shape[:2], keys + 1), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, torch.where(indices < 0, keys, indices), True)[:, None, :, :keys]
    if mask is None:
        return chosen.tril() if causal and rows > 1 else chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
