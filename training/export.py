"""Trained parameters to a checkpoint folder as Kimi publishes its own: INT4 experts, the rest bf16, one shard.

The codes in the file are the integers that training multiplied with, and every other weight is the bf16 value that it
used, so the file holds the trained network and not an approximation of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from perilune.checkpoint.write import write_checkpoint
from perilune.layout.names import expected_tensors
from perilune.quant.int4 import pack
from perilune.text.tokenizer import NAMES_FILE, RANKS_FILE
from training.configs import Recipe
from training.model import Params, is_bias, is_expert, quantised

SHARD_BYTES = 1 << 30
TEMPERATURE = 1.0


def tensors(params: Params, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors in the order of the forward pass."""
    coded = {name: quantised(weight) for name, weight in params.items() if is_expert(name)}
    for info in expected_tensors(recipe.spec):
        if info.kind != "expert":
            yield info.name, params[info.name] if is_bias(info.name) else params[info.name].bfloat16()
            continue
        before, _, after = info.name.partition(".experts.")
        expert, _, projection = after.partition(".")
        codes, scale = coded[f"{before}.experts.{projection}"]
        yield f"{info.name}_packed", pack(codes[int(expert)].flatten(-2).to(torch.int8))
        yield f"{info.name}_scale", scale[int(expert)].bfloat16()
        yield f"{info.name}_shape", torch.tensor(info.shape, dtype=torch.int32)


def export(params: Params, recipe: Recipe, vocabulary: Path, out: Path) -> None:
    """Writes a complete model folder, replacing the one at ``out``; the card is left to the figures.

    Args:
        params: float32 parameters before rounding.
        vocabulary: folder of the tokenizer's two files.
    """
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    write_checkpoint(fresh, recipe.config, tensors(params, recipe), SHARD_BYTES)
    for name in (RANKS_FILE, NAMES_FILE):
        shutil.copyfile(vocabulary / name, fresh / name)
    config = recipe.config
    generation = {
        "max_length": config["max_position_embeddings"],
        "eos_token_id": config["eos_token_id"],
        "do_sample": True,
        "temperature": TEMPERATURE,
    }
    (fresh / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    card = out / "README.md"
    if card.exists():
        shutil.copyfile(card, fresh / card.name)
    shutil.rmtree(out, ignore_errors=True)
    fresh.replace(out)
