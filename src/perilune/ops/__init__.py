"""The one protocol that every backend implements, and the batch that its functions work on.

Backends: ``ref`` (readable torch, also in float64: the oracle). Shapes use the symbols of docs/shapes.md: T tokens of
R rows, H heads, L latent, N nope, P rope, V value, D = L + P values of one token in the cache, E experts, K top-k.
Knows nothing of layers, checkpoints or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from perilune.quant.tensors import Weight


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R rows, each row a run of neighbouring positions of one sequence.

    Attributes:
        positions: int64 [T], position of each token in its sequence.
        slots: int64 [T], where each token's latent goes: ``block · block_size + offset``.
        row_starts: R + 1 token indices; row r is tokens ``row_starts[r] : row_starts[r + 1]``.
        kv_lens: R lengths, tokens in the cache once this batch is written.
        block_tables: int64 [R, blocks], padded with -1.
    """

    positions: Tensor
    slots: Tensor
    row_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How experts are chosen: sigmoid scores, biased for the choice only, restricted to the best groups."""

    top_k: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    scaling: float


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(silu(gate(x)) · up(x))``: gate and up [I, h], down [h, I]. Dense, shared and routed alike."""

    gate: Weight
    up: Weight
    down: Weight


class Ops(Protocol):
    """What a network needs from a device. Activations keep their dtype; sums run in float32 or wider."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of ``table`` [vocab, h] for int64 ``ids`` [T] → [T, h]."""
        ...

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """[T, in] times ``weight`` [out, in] transposed → [T, out]."""
        ...

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """A projection of its own for each head: [T, H, in] with ``weight`` [H, out, in] → [T, H, out]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension: normalised, rounded to x's dtype, then times ``weight``."""
        ...

    def rotary(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, P/2] of ``positions`` [T] times ``frequencies`` [P/2] (float64), times ``scale``.

        Angles are formed in float64 and rounded once, after cos and sin.
        """
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates pairs (2k, 2k + 1) of ``x`` [T, …, P] in place order, by ``cos`` and ``sin`` [T, P/2]."""
        ...

    def kv_write(self, kv: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
        """Stores ``latent`` [T, L] ‖ ``k_rope`` [T, P] at ``slots`` of one layer's cache [blocks, block_size, D]."""
        ...

    def mla_absorbed(
        self, q_latent: Tensor, q_rope: Tensor, kv: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of ``q_latent`` [T, H, L] ‖ ``q_rope`` [T, H, P] over the paged latents.

        Returns the weighted latents [T, H, L] and the natural-log sum of exponentials [T, H] of the scaled scores; a
        query that sees no token gives 0 and -inf.
        """
        ...

    def mla_decompressed(
        self, q: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The same attention over keys and values made from the latents.

        ``q`` [T, H, N + P], ``w_uk`` [H, N, L], ``w_uv`` [H, V, L] → values [T, H, V] and log-sum-exp [T, H].
        """
        ...

    def merge(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Joins partial attentions over disjoint keys: outs [T, H, *], lses [T, H]. Parts that saw nothing drop out."""
        ...

    def route(self, x: Tensor, router: Tensor, bias: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        """Chooses experts for ``x`` [T, h]: ids int64 [T, K], best first (ties: lower id), and weights [T, K].

        ``router`` [E, h] and ``bias`` [E] are float32 or wider and so are the logits, scores and weights.
        """
        ...

    def gated_mlp(self, x: Tensor, mlp: GatedMLP) -> Tensor:
        """[T, h] → [T, h]."""
        ...

    def moe(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[GatedMLP]) -> Tensor:
        """Weighted sum over each token's chosen experts → [T, h], added up in the order of ``ids``."""
        ...
