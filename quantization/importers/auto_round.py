"""auto-round's own quant_method: the tensors are GPTQ's or AutoAWQ's, as `packing_format` says.

Source: auto-round 0.16, export/export_to_autoround/export.py for what is written, and
inference/{backend,convert_model}.py for how it is read.
"""

from __future__ import annotations

from warploom.printable import brief
from warploom.quantization.importers.layer import Config, refused, whole, word

SOURCE = "auto-round"
METHODS = (SOURCE, "intel/auto-round")
# Whose layout each packing is, and GPTQ's checkpoint_format, by which zero points are stored.
PACKINGS: dict[str, tuple[str, str | None]] = {
    "auto": ("gptq", "gptq"),
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round:gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", None),
    "auto_round:awq": ("awq", None),
}


def resolved(config: Config) -> tuple[str, Config]:
    """Return the source whose layout the tensors have, and the configuration that it would have.

    Raises:
        ProblemError: another packing, weights that are no integers, or activations that are
            quantized or rotated first.
    """
    packing = word(SOURCE, config, "packing_format", "auto")
    if packing not in PACKINGS:
        raise refused(
            SOURCE,
            f"packing_format {brief(packing)}",
            rule=f"must be one of {', '.join(PACKINGS)}",
        )
    if (kind := word(SOURCE, config, "data_type", "int")) != "int":
        raise refused(SOURCE, f"data_type {brief(kind)}", rule="must be 'int'")
    if (bits := whole(SOURCE, config, "act_bits", 16)) < 16:
        raise refused(SOURCE, f"act_bits {bits}", rule="activations must not be quantized")
    for field in ("rotation_config", "super_bits", "super_group_size"):
        if (found := config.get(field)) is not None and found != {}:
            raise refused(SOURCE, f"{field} {brief(found)}", rule="must be empty")
    source, layout = PACKINGS[packing]
    kept = {field: config[field] for field in ("bits", "group_size", "sym") if field in config}
    return source, {**kept, "quant_method": source, "checkpoint_format": layout}
