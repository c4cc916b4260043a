"""Training's own forward pass equals the engine's, and the exported file holds what training multiplied with."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from training.batches import Document, document, one_per_row
from training.batches import pack as pack_rows
from training.chats import sample
from training.configs import Recipe
from training.export import export
from training.model import Params, initial, is_bias, is_expert, logits, quantised, stored

from perilune.checkpoint.load import Checkpoint
from perilune.model.stack import Network
from perilune.model.weights import take_weights
from perilune.ops import Batch as EngineBatch
from perilune.ops.ref import RefOps
from perilune.quant.int4 import pack, quantize, unpack
from perilune.quant.tensors import Int4
from perilune.text.tokenizer import Tokenizer

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
    ours, loads = logits(used, small.spec, one_per_row(docs))
    assert [int(load.sum()) for load in loads] == [2 * one_per_row(docs).ids.numel()] * 2
    wanted = [i - 1 for doc in docs for i, learned in enumerate(doc.learned) if learned]
    theirs = torch.cat(
        [engine_logits(tmp_path / "model", doc)[[i - 1 for i, t in enumerate(doc.learned) if t]] for doc in docs]
    )
    assert len(wanted) == len(theirs)
    assert float(theirs.std()) > 0.3, "logits that are all alike would prove nothing"
    assert float((ours - theirs).abs().max()) <= TOLERANCE


def test_packed_documents_do_not_see_each_other(small: Recipe, tokenizer: Tokenizer) -> None:
    params = {name: param.double() for name, param in random_params(small).items()}
    rng = random.Random(1)
    docs = sorted((document(sample(rng), tokenizer) for _ in range(5)), key=lambda doc: -len(doc.ids))
    together = logits(params, small.spec, pack_rows(docs, sum(len(doc.ids) for doc in docs)))[0]
    apart = torch.cat([logits(params, small.spec, one_per_row([doc]))[0] for doc in docs])
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


def test_gradients_pass_the_rounding_unchanged(small: Recipe) -> None:
    params = {name: p.requires_grad_(not is_bias(name)) for name, p in initial(small.spec, 0).items()}
    for name, rounded in stored(params).items():
        if not is_bias(name):
            (grad,) = torch.autograd.grad(rounded.sum(), [params[name]])
            assert torch.equal(grad, torch.ones_like(grad))
