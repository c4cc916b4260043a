"""Are we equal to transformers' DeepseekV3, on random checkpoints of the same architecture?

For each random checkpoint (n_group 1 and 4, with and without a query latent, both values of beta_fast, lengths 1 to
300) our network runs it as whole prefill, chunked prefill over a shuffled block table, and decode, in both forms of
attention; every logit of every position is compared.

* float64: transformers casts to float32 in four places (RMSNorm, attention softmax, router, rope tables).
  ``lift_casts`` lists and lifts them, nothing else. Bar: max|Δ| / max|ref| ≤ 1e-9.
* float32: transformers as it is. Bar: ≤ 1e-4.

Choosing the top-k is not continuous: where the margin of a choice is under 1e-6, two right implementations may differ.
Such tokens, and all that attend to them, are counted and not compared.

    python benchmarks/equal_transformers.py --json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from perilune.checkpoint.load import Checkpoint
from perilune.checkpoint.tiny import tiny_config, write_tiny
from perilune.model.mla import AttentionForm
from perilune.model.stack import Network
from perilune.model.weights import take_weights
from perilune.ops import Batch
from perilune.ops.ref import RefOps

MIN_MARGIN = 1e-6
MIN_CASES = 20
BLOCK_SIZE = 16
MSCALES = ((1.0, 1.0), (0.707, 1.0), (1.0, 0.0))
LENGTHS = (1, 2, 17, 63, 64, 65, 128, 200, 299, 300)


@dataclass(frozen=True, slots=True)
class Case:
    """One random checkpoint and what was run on it."""

    name: str
    config: dict[str, Any]
    seed: int
    length: int


def random_cases(count: int, seed: int) -> list[Case]:
    """``count`` configurations that walk through every mix of the architecture's switches; sizes are random."""
    rng = random.Random(seed)
    cases = []
    for index in range(count):
        n_group, q_latent, beta_fast = (1, 4)[index % 2], index // 2 % 2 == 0, (1.0, 32.0)[index // 4 % 2]
        experts = rng.choice((4, 6, 12, 24)) if n_group == 1 else rng.choice((8, 16, 24))
        topk_group = 1 if n_group == 1 else rng.randint(1, 3)
        top_k = rng.randint(1, min(4, experts // n_group * topk_group))
        factor, original = rng.choice((4, 40, 64)), rng.choice((64, 4096))
        rope = {
            "type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": original,
            "beta_fast": beta_fast,
            "beta_slow": 1.0,
            **dict(zip(("mscale", "mscale_all_dim"), MSCALES[index // 8 % len(MSCALES)], strict=True)),
        }
        config = tiny_config(
            model_type="deepseek_v3",
            hidden_size=32 * rng.randint(1, 4),
            num_hidden_layers=rng.randint(2, 4),
            num_attention_heads=(heads := rng.choice((2, 3, 4))),
            num_key_value_heads=heads,
            q_lora_rank=8 * rng.randint(2, 6) if q_latent else None,
            kv_lora_rank=8 * rng.randint(2, 8),
            qk_nope_head_dim=8 * rng.randint(1, 4),
            qk_rope_head_dim=rng.choice((8, 16, 64)),
            v_head_dim=8 * rng.randint(1, 4),
            n_routed_experts=experts,
            num_experts_per_tok=top_k,
            n_group=n_group,
            topk_group=topk_group,
            n_shared_experts=rng.choice((1, 1, 2)),
            first_k_dense_replace=rng.randint(0, 1),
            norm_topk_prob=index % 5 != 3,
            routed_scaling_factor=rng.choice((1.0, 2.5, 2.827)),
            rms_norm_eps=rng.choice((1e-5, 1e-6)),
            rope_theta=rng.choice((10000.0, 50000.0)),
            rope_scaling=rope if index % 7 != 6 else None,
            max_position_embeddings=factor * original,
        )
        name = f"{index:02d} g{n_group} {'q-latent' if q_latent else 'q-plain'} beta{beta_fast:g} e{experts}k{top_k}"
        cases.append(Case(name, config, seed * 1000 + index, LENGTHS[index % len(LENGTHS)]))
    return cases


# ── the oracle ──────────────────────────────────────────────────────────────────────────────────────────────────────


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """transformers' own model of the checkpoint, in plain (eager) attention and experts."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = DeepseekV3ForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.to(dtype).eval() if dtype == torch.float64 else model.eval()


def yarn_frequencies(rope: dict[str, Any] | None, theta: float, dim: int) -> Any:
    """Inverse frequencies in float64, written down from the YaRN paper apart from the project's own code."""
    exponents = np.arange(0, dim, 2) / dim
    extrapolated = 1.0 / theta**exponents
    if not rope:
        return extrapolated

    def correction_dim(turns: float) -> float:
        turns_in_context = rope["original_max_position_embeddings"] / (turns * 2 * np.pi)
        return float(dim * np.log(turns_in_context) / (2 * np.log(theta)))

    low = max(np.floor(correction_dim(rope["beta_fast"])), 0)
    high = min(np.ceil(correction_dim(rope["beta_slow"])), dim - 1)
    keep = 1 - np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return extrapolated / rope["factor"] * (1 - keep) + extrapolated * keep


@contextmanager
def lift_casts(model: Any, config: dict[str, Any]) -> Iterator[None]:
    """Lifts transformers' four float32 casts, so that it computes in float64 throughout. This is the whole list."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

    frequencies = yarn_frequencies(config["rope_scaling"], config["rope_theta"], config["qk_rope_head_dim"])
    inv_freq = torch.from_numpy(frequencies)
    rotary = model.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq.float(), inv_freq.float(), rtol=1e-5, atol=0)

    def rms_norm(self: Any, x: Tensor) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rope_tables(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * inv_freq.to(x.device)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling

    float32, softmax = torch.float32, torch.nn.functional.softmax

    def wide_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim, dtype=torch.float64 if dtype == float32 else dtype)

    def router_type(self: Tensor, dtype: torch.dtype) -> Tensor:
        return self.to(torch.float64 if dtype == float32 else dtype)

    with (
        mock.patch.object(hf.DeepseekV3RMSNorm, "forward", rms_norm),
        mock.patch.object(hf.DeepseekV3RotaryEmbedding, "forward", rope_tables),
        mock.patch.object(hf.nn.functional, "softmax", wide_softmax),
        mock.patch.object(torch.Tensor, "type", router_type),  # the router is the only caller of Tensor.type
    ):
        yield


@contextmanager
def record_margins(model: Any, config: dict[str, Any], margins: list[Tensor]) -> Iterator[None]:
    """Collects, for each MoE layer, how close each token's choice of groups and experts was: [T]."""
    groups, topk_group, top_k = config["n_group"], config["topk_group"], config["num_experts_per_tok"]

    def hook(gate: Any, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        biased = outputs[0].sigmoid() + gate.e_score_correction_bias
        margin = torch.full(biased.shape[:1], torch.inf, dtype=biased.dtype, device=biased.device)
        if groups > 1:
            scores = biased.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)
            if topk_group < groups:
                ordered = scores.sort(dim=-1, descending=True).values
                margin = torch.minimum(margin, ordered[:, topk_group - 1] - ordered[:, topk_group])
            best = scores.topk(topk_group, dim=-1).indices
            allowed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, value=True)
            biased = biased.unflatten(-1, (groups, -1)).masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        if top_k < biased.shape[-1]:
            ordered = biased.sort(dim=-1, descending=True).values
            margin = torch.minimum(margin, ordered[:, top_k - 1] - ordered[:, top_k])
        margins.append(margin)

    handles = [
        module.register_forward_hook(hook) for name, module in model.named_modules() if name.endswith("mlp.gate")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_ours(path: Path, dtype: torch.dtype, device: str, form: AttentionForm) -> Network:
    """Our network of the checkpoint, every key accounted for."""
    checkpoint = Checkpoint.open(path)
    source = checkpoint.source(dtype, device, None)
    weights = take_weights(checkpoint.spec, source, dtype)
    source.finish()
    return Network.build(checkpoint.spec, weights, RefOps(), form)


def run_chunks(network: Network, ids: Tensor, chunks: list[int], seed: int) -> Tensor:
    """Logits [T, vocab] of one sequence run in ``chunks``, over a shuffled block table and a cache full of NaN."""
    device = ids.device
    blocks = -(-len(ids) // BLOCK_SIZE)
    order = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(seed))[:blocks].to(device)
    kv = network.new_cache(blocks + 3, BLOCK_SIZE).fill_(torch.nan)
    logits, start = [], 0
    for chunk in chunks:
        positions = torch.arange(start, start + chunk, device=device)
        slots = order[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = Batch(positions, slots, (0, chunk), (start + chunk,), order.unsqueeze(0))
        wanted = torch.arange(chunk, device=device)
        logits.append(network.forward(ids[start : start + chunk], batch, kv, wanted))
        start += chunk
    return torch.cat(logits)


def schedules(length: int, seed: int) -> dict[str, list[int]]:
    """Ways to run ``length`` tokens: all at once, in random chunks, and one by one after half of them."""
    rng = random.Random(seed)
    chunks, left = [], length
    while left:
        chunks.append(min(left, rng.randint(1, 96)))
        left -= chunks[-1]
    half = max(1, length // 2)
    return {"prefill": [length], "chunked": chunks, "decode": [half, *([1] * (length - half))]}


# ── comparison ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Outcome:
    """Worst relative error of one case and dtype; rows compared and left out."""

    worst: float
    worst_run: str
    rows: int
    skipped: int


def compare(case: Case, path: Path, dtype: torch.dtype, device: str) -> Outcome:
    """Runs both on one checkpoint."""
    model = load_transformers(path, dtype).to(device)
    generator = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(0, case.config["vocab_size"], (case.length,), generator=generator).to(device)
    margins: list[Tensor] = []
    with torch.inference_mode(), record_margins(model, case.config, margins):
        if dtype == torch.float64:
            with lift_casts(model, case.config):
                expected = model(input_ids=ids.unsqueeze(0)).logits[0]
        else:
            expected = model(input_ids=ids.unsqueeze(0)).logits[0]
    close = (
        torch.stack([m.to("cpu") for m in margins]).amin(0) < MIN_MARGIN if margins else torch.zeros(case.length) > 0
    )
    # A token that chose on the edge may differ, and so may all later ones, which attend to it.
    comparable = ~(close.cumsum(0) > 0)
    rows = int(comparable.sum())
    worst, worst_run = 0.0, ""
    for form in ("absorbed", "decompressed"):
        network = load_ours(path, dtype, device, form)
        for run, chunks in schedules(case.length, case.seed).items():
            ours = run_chunks(network, ids, chunks, case.seed)
            error = _relative(ours[:rows], expected[:rows])
            if error >= worst:
                worst, worst_run = error, f"{form} {run}"
    return Outcome(worst, worst_run, rows, case.length - rows)


def _relative(ours: Tensor, expected: Tensor) -> float:
    if not len(expected):
        return 0.0
    error = float((ours - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")  # NaN never passes as small


def run(count: int, seed: int, device: str, report: Callable[[str], None]) -> dict[str, Any]:
    """All cases in both dtypes; the summary that ``--json`` prints."""
    results = []
    worst = {"float64": 0.0, "float32": 0.0}
    totals = {"rows": 0, "skipped": 0}
    for case in random_cases(count, seed):
        row: dict[str, Any] = {"case": case.name, "length": case.length}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            write_tiny(path, case.config, "float32", case.seed)
            for dtype in (torch.float64, torch.float32):
                name = str(dtype).removeprefix("torch.")
                outcome = compare(case, path, dtype, device)
                worst[name] = max(worst[name], outcome.worst)
                totals["rows"] += outcome.rows
                totals["skipped"] += outcome.skipped
                row |= {name: outcome.worst, f"{name}_run": outcome.worst_run, f"{name}_rows": outcome.rows}
        results.append(row)
        report(f"{case.name:32} T={case.length:<4} float64 {row['float64']:.1e}  float32 {row['float32']:.1e}")
    return {
        "float64_worst_rel": worst["float64"],
        "float32_worst_rel": worst["float32"],
        "cases": len(results),
        "rows_compared": totals["rows"],
        "rows_skipped": totals["skipped"],
        "device": device,
        "results": results,
    }


def passed(summary: dict[str, Any]) -> bool:
    """Both bars met, on enough cases, each of which compared something."""
    compared = all(row[f"{name}_rows"] > 0 for row in summary["results"] for name in ("float64", "float32"))
    exact = summary["float64_worst_rel"] <= 1e-9 and summary["float32_worst_rel"] <= 1e-4
    return exact and compared and summary["cases"] >= MIN_CASES


def main() -> int:
    """Exit code 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="Compare with transformers' DeepseekV3 on random checkpoints.")
    parser.add_argument("--cases", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    args = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small lose by threads
    started = time.perf_counter()
    summary = run(args.cases, args.seed, args.device, lambda line: print(line, file=sys.stderr, flush=True))
    summary["seconds"] = round(time.perf_counter() - started, 1)
    if args.json:
        print(json.dumps(summary))
    else:
        print(f"float64 {summary['float64_worst_rel']:.2e}, float32 {summary['float32_worst_rel']:.2e}")
    return 0 if passed(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
