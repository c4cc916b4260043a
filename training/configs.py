"""What is trained: architectures as their config.json, and the course of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from perilune.checkpoint.tiny import int4_config, tiny_config
from perilune.config import ModelSpec
from perilune.text.tokenizer import NUM_SPECIALS


@dataclass(frozen=True, slots=True)
class Course:
    """How one model is trained.

    Attributes:
        knots: (step, factor on the learning rates) from before step 0 to the end; linear in between.
        quantise_from: first step with weights as the file will hold them.
        tokens: of one step, about.
        widths: (step, tokens) in ascending order: from that step on, no chat is longer than so many tokens.
        muon_lr, adam_lr: peak rates for matrices inside the network and for everything else.
        drills: share of bare worked answers among the documents of the first ``drill_steps`` steps.
        halve: products inside the network in bfloat16.
        watch, watch_every: held-out chats of every kind that are scored, and after how many steps again.
        shards: parts that a step is cut into, computed side by side.
        balance: step of the router's correction bias.
        average: decay of the averaged weights that are exported.
    """

    seed: int
    knots: tuple[tuple[int, float], ...]
    quantise_from: int
    tokens: int
    widths: tuple[tuple[int, int], ...]
    muon_lr: float
    adam_lr: float
    drills: float = 0.5
    drill_steps: int = 0
    halve: bool = False
    watch: int = 60
    watch_every: int = 200
    shards: int = 2
    balance: float = 5e-3
    average: float = 0.99

    @property
    def steps(self) -> int:
        """Optimiser steps in all."""
        return self.knots[-1][0]

    @property
    def width(self) -> int:
        """Tokens of the longest chats at the end."""
        return self.widths[-1][1]

    def width_at(self, step: int) -> int:
        """Tokens of the longest chats of a step."""
        return [width for start, width in self.widths if start <= step][-1]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model to train.

    Attributes:
        source: name of the generator of its chats (``sources.SOURCES``).
        dims: the fields of config.json that size it.
    """

    name: str
    source: str
    num_ranks: int
    dims: dict[str, Any]
    course: Course

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_config(self.config)

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the exported model, in K2's form: YaRN from 4,096 to 262,144 positions, experts INT4."""
        return tiny_config(
            vocab_size=self.num_ranks + NUM_SPECIALS,
            bos_token_id=self.num_ranks,
            eos_token_id=self.num_ranks + 2,
            pad_token_id=self.num_ranks + NUM_SPECIALS - 1,
            torch_dtype="bfloat16",
            quantization_config=int4_config(),
            **self.dims,
        )


PICO: Final = Recipe(
    name="pico",
    source="pico",
    num_ranks=512,
    dims={
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.0,
    },
    course=Course(
        seed=1,
        knots=((-1, 0.0), (39, 1.0), (300, 1.0), (1800, 0.0), (1840, 0.5), (2800, 0.0)),
        quantise_from=1000,
        drill_steps=1000,
        tokens=3072,
        widths=((0, 384),),
        muon_lr=0.015,
        adam_lr=2e-3,
    ),
)

NANO: Final = Recipe(
    name="nano",
    source="nano",
    num_ranks=1024,
    dims={
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.0,
    },
    course=Course(
        seed=1,
        knots=((-1, 0.0), (100, 1.0), (5000, 1.0), (8000, 0.0)),
        quantise_from=4800,
        drill_steps=2000,
        tokens=6144,
        widths=((0, 512), (5300, 2048)),
        muon_lr=0.015,
        adam_lr=2e-3,
        halve=True,
        watch=24,
        watch_every=500,
        average=0.998,
    ),
)
"""Some 50 million tokens."""

RECIPES: Final = {recipe.name: recipe for recipe in (PICO, NANO)}
