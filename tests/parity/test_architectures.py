"""For every architecture that is claimed: a faithful carrier makes the hand-off the plain model, in logits and in texts."""

import copy

import pytest
import torch

from kvferry.evaluate.controls import Passthrough
from kvferry.kv.dump import read_shards, write_dump
from kvferry.kv.handoff import Handoff, Native, Span, read
from kvferry.kv.mapper import Affine, Mapper, load_mapper, save_mapper
from kvferry.prepare.architecture import check_architecture
from kvferry.prepare.models import load_model

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SELECTED = [[2, 0, 1], [0, 2, 1], [1, 0, 2]]
ROWS = ((3, 9, 5), (11, 0, 4), (1, 2, 2))
# Set beforehand: bfloat16 keeps 8 bits, and three layers round some ten times.
BFLOAT16_TOLERANCE = 0.05


def prompts(lengths, seed=21):
    torch.manual_seed(seed)
    return [torch.randint(3, 250, (length,)).tolist() for length in lengths]


def read_on(system, rows, cuts=ROWS):
    """Logits of each row's last piece, after its earlier pieces came through the system; rows padded to one batch."""
    prefix = system.start(len(rows))
    for number in range(len(cuts[0]) - 1):
        span = [row[sum(own[:number]) : sum(own[: number + 1])] for row, own in zip(rows, cuts, strict=True)]
        prefix = system.extend(prefix, Span.of(span, system.target.device))
    tails = [row[len(row) - own[-1] :] for row, own in zip(rows, cuts, strict=True)]
    logits, _ = read(system.target, prefix, Span.of(tails, system.target.device))
    return [part[: own[-1]] for part, own in zip(logits, cuts, strict=True)]


@torch.inference_mode()
def plain(model, rows, cuts=ROWS):
    return [model(torch.tensor([row])).logits[0, -own[-1] :] for row, own in zip(rows, cuts, strict=True)]


@pytest.mark.parametrize("carrier", ["own reading", "own cache", "identity", "identity behind a native head"])
def test_a_faithful_carrier_gives_the_logits_of_a_plain_forward(carrier, half_split_model, identity_mapper):
    model, rows = half_split_model, prompts(map(sum, ROWS))
    mapper = identity_mapper(model, SELECTED)
    system = {
        "own reading": lambda: Native(model),
        "own cache": lambda: Handoff(model, model, Passthrough()),
        "identity": lambda: Handoff(model, model, mapper),
        "identity behind a native head": lambda: Handoff(model, model, mapper, native_head=4),
    }[carrier]()
    for found, wanted in zip(read_on(system, rows), plain(model, rows), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_greedy_decoding_after_a_handoff_is_transformers_own(half_split_model, identity_mapper):
    model, (prompt,) = half_split_model, prompts([15], seed=31)
    system = Handoff(model, model, identity_mapper(model, SELECTED))
    prefix = system.extend(system.start(1), Span.of([prompt[:-1]], model.device))
    token, written = prompt[-1], []
    for _ in range(40):
        logits, prefix = read(model, prefix, Span.of([[token]], model.device))
        token = int(logits[0, -1].argmax())
        written.append(token)
    ids = torch.tensor([prompt])
    own = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    assert written == own[0, 15:].tolist()
    assert len(set(written)) > 3


def test_a_window_that_no_prompt_outgrows_changes_nothing(tiny_model, identity_mapper):
    model, rows = tiny_model("mistral", sliding_window=256), prompts(map(sum, ROWS))
    check_architecture(model.config, "tiny")
    system = Handoff(model, model, identity_mapper(model, SELECTED))
    for found, wanted in zip(read_on(system, rows), plain(tiny_model("mistral"), rows), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


def with_heads_swapped(model):
    """The same function with the two KV heads, and the query heads that read them, in the other order."""
    swapped = copy.deepcopy(model)
    with torch.no_grad():
        for layer in swapped.model.layers:
            attention = layer.self_attn
            for module in (attention.q_proj, attention.k_proj, attention.v_proj):
                for parameter in module.parameters():
                    parameter.copy_(torch.cat(parameter.chunk(2, 0)[::-1], 0))
            out = attention.o_proj.weight
            out.copy_(torch.cat(out.chunk(2, 1)[::-1], 1))
    return swapped


@pytest.mark.parametrize("kind", ["llama", "llama3", "yarn", "mistral", "ministral3", "qwen2", "qwen3"])
def test_a_twin_with_its_heads_in_another_order_is_mapped_exactly_by_that_order(kind, tiny_model, identity_mapper):
    target, rows = tiny_model(kind), prompts(map(sum, ROWS))
    source = with_heads_swapped(target)
    for found, wanted in zip(plain(source, rows), plain(target, rows), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)
    same = identity_mapper(target, SELECTED)
    affines = [Affine(torch.cat(affine.weight.chunk(2, 1)[::-1], 1), affine.bias) for affine in same.keys]
    exchanged = Mapper(SELECTED, affines, affines, same.kv_heads)
    for found, wanted in zip(read_on(Handoff(source, target, exchanged), rows), plain(target, rows), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)
    wrong = read_on(Handoff(source, target, same), rows)
    assert max(float((a - b).abs().max()) for a, b in zip(wrong, plain(target, rows), strict=True)) > 0.1


@pytest.mark.parametrize("kind", ["llama", "ministral3", "qwen3", "partial"])
def test_in_bfloat16_the_handoff_stays_within_the_tolerance(kind, tiny_model, identity_mapper):
    model, rows = tiny_model(kind).bfloat16(), prompts(map(sum, ROWS))
    for carrier in (Passthrough(), identity_mapper(model, SELECTED)):
        for found, wanted in zip(read_on(Handoff(model, model, carrier), rows), plain(model, rows), strict=True):
            assert found.dtype == torch.bfloat16
            assert (found - wanted).float().norm() / wanted.float().norm() < BFLOAT16_TOLERANCE


def test_from_saved_model_to_saved_mapper_the_chain_gives_the_models_own_logits(
    half_split_model, tokenizer, save_prepared, identity_mapper, tmp_path
):
    """Model and mapper come from disk; the dump of the source, mapped row by row, is the target's own cache."""
    folder, card = save_prepared(tmp_path, half_split_model, tokenizer, "tiny")
    loaded = load_model(folder)
    assert loaded.card == card
    assert (card["layers"], card["kv_heads"], card["head_dim"]) == (3, 2, 8)
    save_mapper(identity_mapper(loaded.model, SELECTED), {"source": card, "target": card}, tmp_path / "mapper")
    mapper, _ = load_mapper(tmp_path / "mapper", card, card)
    rows = prompts(map(sum, ROWS))
    for found, wanted in zip(
        read_on(Handoff(loaded.model, loaded.model, mapper), rows), plain(half_split_model, rows), strict=True
    ):
        torch.testing.assert_close(found, wanted, **CLOSE)
    write_dump(loaded.model, card, {"fit": torch.tensor(prompts([12, 12]))}, {"stride": 5}, tmp_path / "dump")
    (shard,) = read_shards(tmp_path / "dump", "fit")
    for layer, affine in enumerate(mapper.keys):
        parts = [shard.stripped_keys(n).flatten(1) for n in SELECTED[layer]]
        torch.testing.assert_close(affine.blocks(parts), shard.stripped_keys(layer).flatten(1), **CLOSE)
