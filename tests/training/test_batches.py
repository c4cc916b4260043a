"""Chats become tokens deterministically, and loss falls on the model's own words only."""

from __future__ import annotations

import random

import pytest
import torch
from training.batches import Document, Order, document, documents, drill_document, join, prompt_ids, reply_ids, shares
from training.chats import KINDS, PLAIN_CALCULATOR, sample
from training.configs import PICO
from training.samples import Sample, Wish
from training.sources import SOURCES
from training.vocab import gpt2_byte_order, learn

from perilune.text.tokenizer import Tokenizer


def learned_text(doc: Document, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(token for token, learned in zip(doc.ids, doc.learned, strict=True) if learned)


def test_equal_seeds_give_equal_documents_and_others_do_not(tokenizer: Tokenizer) -> None:
    first = documents(SOURCES["pico"], Order("1:7", 3000, 512), tokenizer)
    assert first == documents(SOURCES["pico"], Order("1:7", 3000, 512), tokenizer)
    assert first != documents(SOURCES["pico"], Order("1:8", 3000, 512), tokenizer)
    assert first != documents(SOURCES["nano"], Order("1:7", 3000, 512), tokenizer)
    assert sum(len(doc.ids) for doc in first) >= 3000
    assert max(len(doc.ids) for doc in first) <= 512


def test_training_never_sees_a_held_out_problem() -> None:
    rng = random.Random(11)
    for _ in range(2000):
        chat = sample(rng)
        assert chat.problem is None or not chat.problem.held_out


@pytest.mark.parametrize("kind", KINDS)
def test_wishes_are_granted(kind: str) -> None:
    rng = random.Random(2)
    for _ in range(50):
        chat = sample(rng, Wish(kind=kind, held_out=True))
        assert chat.kind == kind
        assert chat.problem is None or chat.problem.held_out


def test_loss_of_a_last_reply_covers_it_from_think_to_end(tokenizer: Tokenizer) -> None:
    chat = sample(random.Random(4), Wish(kind="sum", turns=2))
    doc = document(chat, tokenizer)
    assert learned_text(doc, tokenizer) == f"<think>{chat.reply.thought}</think>{chat.reply.text}<|im_end|>"
    assert tokenizer.decode(doc.ids).count("<think></think>") == 1, "the first turn's thought is emptied, and no target"


def test_loss_of_an_open_chain_covers_the_call_and_the_answer(tokenizer: Tokenizer) -> None:
    chat = sample(random.Random(6), Wish(kind="call", turns=2, after_tool=True, tools=(PLAIN_CALCULATOR,)))
    text = learned_text(document(chat, tokenizer), tokenizer)
    call, answer = text.removesuffix("<|im_end|>").split("<|im_end|>")
    number = 1 if chat.messages[2].get("tool_calls") or chat.messages[1].get("tool_calls") else 0
    assert f"<|tool_call_begin|>functions.calculator:{number}<|tool_call_argument_begin|>" in call
    assert call.endswith("<|tool_call_end|><|tool_calls_section_end|>")
    assert answer == f"<think>{chat.reply.thought}</think>{chat.reply.text}"


def test_a_reply_is_what_rendering_gives_back_inside_a_chain(tokenizer: Tokenizer) -> None:
    """The ids that the model learns to write are those which the next prompt of its chain contains."""
    chat = sample(random.Random(8), Wish(kind="call", turns=1, after_tool=False))
    result = {"role": "tool", "tool_call_id": chat.reply.calls[0].id, "content": "1"}
    longer = Sample("call", (*chat.messages, chat.reply.message(), result), chat.tools, chat.reply)
    written = (*prompt_ids(chat, tokenizer), *reply_ids(chat.reply, tokenizer))
    assert prompt_ids(longer, tokenizer)[: len(written)] == written


def test_a_drill_teaches_all_but_the_problem(tokenizer: Tokenizer) -> None:
    rng = random.Random(12)
    for _ in range(20):
        doc = drill_document(SOURCES["pico"], rng, tokenizer)
        problem, _, rest = tokenizer.decode(doc.ids).removeprefix("<think>").partition("\n")
        assert learned_text(doc, tokenizer) == f"\n{rest}"
        assert rest.endswith(".<|im_end|>")
        assert len(problem) == doc.learned.index(True) - 1, "digits and signs are single tokens"


def test_joining_keeps_every_document_whole(tokenizer: Tokenizer) -> None:
    docs = documents(SOURCES["pico"], Order("join", 4000, 384), tokenizer)
    batch = join(docs)
    for number, doc in enumerate(docs):
        inside = batch.documents == number
        assert tuple(batch.ids[inside].tolist()) == doc.ids
        assert batch.positions[inside].tolist() == list(range(len(doc.ids)))
    assert len(batch.targets) == sum(sum(doc.learned) for doc in docs)
    assert torch.equal(batch.ids[batch.wanted + 1], batch.targets)
    assert torch.equal(batch.documents[batch.wanted], batch.documents[batch.wanted + 1]), "nothing across documents"


def test_joining_keeps_the_order() -> None:
    batch = join([Document((1, 2), (False, True)), Document((3, 4, 5), (False, True, True))])
    assert batch.ids.tolist() == [1, 2, 3, 4, 5]
    assert (batch.wanted.tolist(), batch.targets.tolist()) == ([0, 2, 3], [2, 4, 5])


def test_shares_are_even_and_lose_nothing(tokenizer: Tokenizer) -> None:
    docs = documents(SOURCES["pico"], Order("share", 4000, 384), tokenizer)
    first, second = shares(docs, 2)
    assert sorted(doc.ids for doc in first + second) == sorted(doc.ids for doc in docs)
    assert abs(sum(len(doc.ids) for doc in first) - sum(len(doc.ids) for doc in second)) <= 100


def test_vocabulary_has_kimis_byte_order_and_no_digit_in_a_merge(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(rank)[0] for rank in range(256)] == gpt2_byte_order()
    assert (tokenizer.encode("!"), tokenizer.encode("A"), tokenizer.encode("\0")) == ([0], [32], [188])
    merges = [tokenizer.token_bytes(rank) for rank in range(256, tokenizer.num_ranks)]
    assert not any(byte in b"0123456789" for token in merges for byte in token)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1234")] == list("1234")
    assert tokenizer.special("<|im_end|>") == tokenizer.num_ranks + 2
    assert tokenizer.special("[PAD]") == tokenizer.vocab_size - 1


def test_merges_follow_the_counts_with_ties_in_order() -> None:
    assert learn(["abab abab", "zz"], 259)[256:] == [b"ab", b"abab", b" abab"]
    assert len(learn(["ab"], 400)) == 257, "one merge is all there is"


def test_the_published_config_is_k2s() -> None:
    spec = PICO.spec
    assert (spec.model_type, spec.vocab_size, spec.eos_token_ids) == ("kimi_k2", 768, (514,))
    assert (spec.rope.kind, spec.rope.factor, spec.max_position) == ("yarn", 64.0, 262144)
    assert spec.quant is not None
