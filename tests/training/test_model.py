"""Training's own forward pass equals the engine's, and the exported file holds what training multiplied with."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training.batches import Document, document, join
from training.chats import sample
from training.configs import NANO, Recipe
from training.export import export
from training.model import Params, halved, initial, is_bias, is_expert, logits, quantised, stored

from perilune.checkpoint.load import Checkpoint
from perilune.model.stack import Network
from perilune.model.weights import take_weights
from perilune.ops import Batch as EngineBatch
from perilune.ops.ref import RefOps
from perilune.quant.int4 import pack, quantize, unpack
from perilune.quant.tensors import Int4
from perilune.text.tokenizer import Tokenizer
from training import model

TOLERANCE = 1e-9
"""In float64, where rounding can't hide a difference."""


def random_params(recipe: Recipe) -> Params:
    """Larger than an initial state, with norms and biases that matter."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: param * 3 if param.dim() > 1 else param + 0.1 * torch.randn(param.shape, generator=generator)
        for name, param in initial(recipe.spec, 3).items()
    }


def engine_logits(folder: Path, doc: Document) -> torch.Tensor:
    """Logits of every position through the engine's network, as one row of one prompt."""
    checkpoint = Checkpoint.open(folder)
    source = checkpoint.source(torch.float64, "cpu", None)
    weights = take_weights(checkpoint.spec, source, torch.float64)
    source.finish()
    network = Network.build(checkpoint.spec, weights, RefOps())
    count = len(doc.ids)
    blocks = -(-count // 32)
    where = torch.arange(count)
    batch = EngineBatch(where, where, (0, count), (count,), torch.arange(blocks).unsqueeze(0))
    return network.forward(torch.tensor(doc.ids), batch, network.new_cache(blocks, 32), where)


def test_logits_equal_the_engines(small: Recipe, tokenizer: Tokenizer, vocabulary: Path, tmp_path: Path) -> None:
    params = random_params(small)
    export(params, small, vocabulary, tmp_path / "model")
    rng = random.Random(0)
    docs = [document(sample(rng), tokenizer) for _ in range(6)]
    used = {name: param.double() for name, param in stored(params).items()}
    ours, loads = logits(used, small.spec, join(docs))
    assert [int(load.sum()) for load in loads] == [2 * join(docs).ids.numel()] * 2
    wanted = [i - 1 for doc in docs for i, learned in enumerate(doc.learned) if learned]
    theirs = torch.cat(
        [engine_logits(tmp_path / "model", doc)[[i - 1 for i, t in enumerate(doc.learned) if t]] for doc in docs]
    )
    assert len(wanted) == len(theirs)
    assert float(theirs.std()) > 0.3, "logits that are all alike would prove nothing"
    assert float((ours - theirs).abs().max()) <= TOLERANCE


def test_joined_documents_do_not_see_each_other(small: Recipe, tokenizer: Tokenizer) -> None:
    params = {name: param.double() for name, param in random_params(small).items()}
    rng = random.Random(1)
    docs = sorted((document(sample(rng), tokenizer) for _ in range(5)), key=lambda doc: -len(doc.ids))
    together = logits(params, small.spec, join(docs))[0]
    apart = torch.cat([logits(params, small.spec, join([doc]))[0] for doc in docs])
    assert float((together - apart).abs().max()) <= TOLERANCE


def test_codes_in_the_file_are_the_integers_of_training(small: Recipe, vocabulary: Path, tmp_path: Path) -> None:
    params = random_params(small)
    export(params, small, vocabulary, tmp_path / "model")
    source = Checkpoint.open(tmp_path / "model").source(torch.float32, "cpu", None)
    used = stored(params)
    for name, param in params.items():
        if not is_expert(name):
            continue
        codes, scale = quantised(param)
        for expert in range(small.spec.num_experts):
            weight = source.matrix(name.replace(".experts.", f".experts.{expert}."))
            assert isinstance(weight, Int4)
            assert torch.equal(unpack(weight.packed, param.shape[-1]), codes[expert].flatten(-2).to(torch.int8))
            assert torch.equal(weight.scale.float(), scale[expert])
            assert torch.equal(weight.dequantize(torch.float32), used[name][expert])


def test_fake_quantisation_is_the_codecs_rule() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) * 0.03
    weight[5, 32:64] = 0
    codes, scale = quantised(weight)
    packed, codec_scale = quantize(weight)
    assert torch.equal(pack(codes.flatten(-2).to(torch.int8)), packed)
    assert torch.equal(scale, codec_scale.float())


def plain_attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float) -> Tensor:
    """One mask over all tokens of all documents."""
    seen = (documents.unsqueeze(0) == documents.unsqueeze(1)).tril()
    scores = (torch.einsum("nhk,mhk->hnm", q, k) * scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("hnm,mhv->nhv", scores.softmax(-1), v)


def test_attention_and_its_gradients_equal_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths on both sides of what is written down, in groups with padding, out of order."""
    monkeypatch.setattr(model, "SHORT", 24)
    lengths = (20, 3, 30, 18, 1, 27)
    groups = model.similar(lengths)
    assert len(groups.shapes) < len(lengths)
    generator = torch.Generator().manual_seed(5)
    sizes = (12, 12, 8)
    q, k, v = (
        torch.randn(sum(lengths), 2, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in sizes
    )
    ours = model.attend(q, k, v, groups, 0.3)
    plain = plain_attend(q, k, v, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), 0.3)
    towards = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    assert float((ours - plain).abs().max().detach()) <= TOLERANCE
    for mine, theirs in zip(
        torch.autograd.grad(ours, (q, k, v), towards), torch.autograd.grad(plain, (q, k, v), towards), strict=True
    ):
        assert float((mine - theirs).abs().max()) <= TOLERANCE


def test_experts_and_their_gradients_equal_one_product_per_token(small: Recipe) -> None:
    spec = small.spec
    prefix = "model.layers.1."
    params = {n: p.double().requires_grad_() for n, p in random_params(small).items() if n.startswith(prefix + "mlp.")}
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(50, spec.hidden_size, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = model.Prefixed(params, prefix)
    ours, load = model.mixture(x, weights, spec)
    gate, up, down = (weights[f"mlp.experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
    scores = torch.sigmoid(x @ weights["mlp.gate.weight"].T)
    chosen = (scores + weights["mlp.gate.e_score_correction_bias"]).topk(spec.top_k, -1).indices
    share = scores.gather(1, chosen)
    share = share / (share.sum(-1, keepdim=True) + 1e-20) * spec.routed_scaling_factor
    plain = torch.zeros_like(x)
    for expert in range(spec.num_experts):
        weight = (share * (chosen == expert)).sum(-1, keepdim=True)
        plain = plain + weight * ((F.silu(x @ gate[expert].T) * (x @ up[expert].T)) @ down[expert].T)
    assert load.tolist() == chosen.flatten().bincount(minlength=spec.num_experts).tolist()
    assert float((ours - plain).abs().max().detach()) <= TOLERANCE
    leaves = (x, gate, up, down, weights["mlp.gate.weight"])
    towards = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, towards), torch.autograd.grad(plain, leaves, towards), strict=True
    ):
        assert float((mine - theirs).abs().max()) <= TOLERANCE


def test_halved_products_change_gradients_by_rounding_only(small: Recipe, tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    batch = join([document(sample(rng), tokenizer) for _ in range(6)])
    found = []
    for params in (initial(small.spec, 0), halved(initial(small.spec, 0))):
        leaves = {name: p.detach().requires_grad_() for name, p in params.items() if not is_bias(name)}
        values, _ = logits({**params, **leaves}, small.spec, batch)
        loss = F.cross_entropy(values, batch.targets)
        found.append(torch.cat([g.float().flatten() for g in torch.autograd.grad(loss, list(leaves.values()))]))
    assert float(F.cosine_similarity(found[0], found[1], dim=0)) > 0.99
    assert not torch.equal(found[0], found[1])


def test_nano_file_and_training_agree_over_the_longest_documents(vocabulary: Path, tmp_path: Path) -> None:
    """Nano's sizes, 2,048 tokens: what the file holds and what training multiplied with give the same logits."""
    nano = replace(NANO, num_ranks=300)
    params = random_params(nano)
    export(params, nano, vocabulary, tmp_path / "model")
    rng = random.Random(4)
    docs = [
        Document(
            tuple(rng.randrange(nano.spec.vocab_size) for _ in range(size)), tuple(i % 16 == 1 for i in range(size))
        )
        for size in (2048, 300)
    ]
    used = {name: param.double() for name, param in stored(params).items()}
    ours, _ = logits(used, nano.spec, join(docs))
    theirs = torch.cat(
        [engine_logits(tmp_path / "model", doc)[[i - 1 for i, t in enumerate(doc.learned) if t]] for doc in docs]
    )
    assert float((ours - theirs).abs().max()) <= TOLERANCE
