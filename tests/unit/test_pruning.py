"""Depth pruning on tiny Llamas: T is the ridge solution, and what comes out is a plain model with fewer layers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvferry.prepare.calibration import Draw, draw_sequences
from kvferry.prepare.corpora import Document
from kvferry.prepare.models import load_model, read_card
from kvferry.prepare.pruning import BATCH, LAMBDA, fit_transform, prepare_pruned, remove_layers, states

IDS = torch.randint(3, 260, (BATCH + 2, 20), generator=torch.Generator().manual_seed(0))
RANGES = pytest.mark.parametrize(("first", "end"), [(1, 2), (2, 4), (4, 5)])


@pytest.fixture
def model(tiny_model):
    """Five layers, wide enough for the MLP output to have full rank over the calibration rows."""
    return tiny_model("llama", 5, seed=3)


def hidden_states(model, ids, layer):
    """States entering `layer`, `[sequences, length, hidden]`, by transformers' own account (before the final norm)."""
    seen = []
    target = model.model.norm if layer == len(model.model.layers) else model.model.layers[layer]
    hook = target.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(input_ids=ids)
    hook.remove()
    return seen[0]


def mlp_output(model, ids, layer):
    """Output of a layer's MLP, by running that module on the states that the layer hands it."""
    seen = []
    hook = model.model.layers[layer].mlp.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.inference_mode():
        model(input_ids=ids)
    hook.remove()
    return seen[0]


def rows(part):
    """All positions but the first, float64 `[rows, hidden]`."""
    return part[:, 1:].flatten(0, 1).double()


def reference(model, first, end, ids):
    """T by least squares on augmented rows; the penalty is λ times the mean diagonal of the summed Gram."""
    mlp = rows(mlp_output(model, ids, first - 1))
    wanted = rows(hidden_states(model, ids, end)) - rows(hidden_states(model, ids, first)) + mlp
    shift = LAMBDA * mlp.square().sum() / mlp.shape[1]
    below = shift.sqrt() * torch.eye(mlp.shape[1], dtype=torch.float64)
    zeros = torch.zeros(mlp.shape[1], wanted.shape[1], dtype=torch.float64)
    return torch.linalg.lstsq(torch.cat([mlp, below]), torch.cat([wanted, zeros])).solution


@RANGES
def test_states_are_those_that_the_model_computes(model, first, end):
    found = states(model, first, end, IDS)
    wanted = mlp_output(model, IDS, first - 1), hidden_states(model, IDS, first), hidden_states(model, IDS, end)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert not any(module._forward_hooks for module in model.modules())


@RANGES
def test_the_transform_is_the_least_squares_solution(model, first, end):
    wanted = reference(model, first, end, IDS)
    # Products in float32 are off by about 1e-7, of which the directions that the data hardly show make somewhat more.
    assert (fit_transform(model, first, end, IDS) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_the_first_position_is_left_out_of_the_fit(model):
    def spoil(_module, _inputs, output):
        output = output.clone()
        output[:, 0] = 1e4
        return output

    clean = fit_transform(model, 2, 4, IDS)
    # Layer 3 hands on nonsense at the first position; nothing after it attends to it before the states are taken.
    hook = model.model.layers[3].register_forward_hook(spoil)
    spoilt = fit_transform(model, 2, 4, IDS)
    hook.remove()
    assert torch.equal(clean, spoilt)


@RANGES
def test_a_layer_before_the_gap_stands_in_for_it(model, tiny_model, first, end):
    full = tiny_model("llama", 5, seed=3)
    transform = fit_transform(full, first, end, IDS)
    remove_layers(model, first, end, IDS)
    assert len(model.model.layers) == model.config.num_hidden_layers == 5 - (end - first)
    mlp = rows(mlp_output(full, IDS, first - 1))
    wanted = rows(hidden_states(full, IDS, first)) - mlp + mlp @ transform
    found = rows(hidden_states(model, IDS, first))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@RANGES
def test_kept_layers_are_the_same_but_for_one_matrix(model, tiny_model, first, end):
    full = tiny_model("llama", 5, seed=3)
    remove_layers(model, first, end, IDS)
    kept = [layer for layer in range(5) if not first <= layer < end]
    changed = set()
    for index, (layer, before) in enumerate(zip(model.model.layers, kept, strict=True)):
        assert layer.self_attn.layer_idx == index
        old = dict(full.model.layers[before].named_parameters())
        changed |= {(index, name) for name, new in layer.named_parameters() if not torch.equal(new, old[name])}
    assert changed == {(first - 1, "mlp.down_proj.weight")}


@RANGES
def test_a_pruned_model_loads_from_disk_and_gives_the_same_logits(model, tmp_path, first, end):
    remove_layers(model, first, end, IDS)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.num_hidden_layers == 5 - (end - first)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=1e-5)
        cache = loaded(input_ids=IDS, use_cache=True)["cache"]
    assert [layer.keys.shape[2] for layer in cache.layers] == [IDS.shape[1]] * (5 - (end - first))


def test_a_pruned_qwen_forgets_the_types_of_removed_layers(tiny_model, tmp_path):
    model = tiny_model("qwen3", 4)
    remove_layers(model, 1, 3, IDS)
    model.save_pretrained(tmp_path)
    assert len(AutoConfig.from_pretrained(tmp_path).layer_types) == 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=1e-5)


def make_identities(model, first, end):
    """Let layers [first, end) hand on what enters them."""
    for layer in model.model.layers[first:end]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()


@RANGES
def test_removing_layers_that_do_nothing_changes_nothing(model, first, end):
    make_identities(model, first, end)
    mlp = rows(mlp_output(model, IDS, first - 1))
    before = rows(hidden_states(model, IDS, 5))
    transform = fit_transform(model, first, end, IDS)
    # T = G(G + sI)⁻¹ with s = λ·trace(G)/p. An eigenvalue e of G adds e·s²/(e + s)² ≤ s/4 to the squared error, p of them at
    # most λ·trace(G)/4: the relative error of M·T is at most √λ / 2 = .005 (and float32 products, far less).
    bound = LAMBDA**0.5 / 2
    assert (mlp @ transform - mlp).norm() <= bound * mlp.norm()
    remove_layers(model, first, end, IDS)
    after = rows(hidden_states(model, IDS, 5 - (end - first)))
    # M is a part of the residual stream, whose error stays as small through the layers that are left.
    assert (after - before).norm() <= bound * before.norm()


def test_removing_layers_that_do_something_changes_something(model):
    before = rows(hidden_states(model, IDS, 5))
    remove_layers(model, 2, 4, IDS)
    assert (rows(hidden_states(model, IDS, 3)) - before).norm() > 0.1 * before.norm()


def test_a_bias_of_the_down_projection_goes_through_the_transform_too(tiny_model):
    model, full = (tiny_model("llama", 4, seed=3, mlp_bias=True) for _ in range(2))
    transform = fit_transform(full, 2, 3, IDS)
    remove_layers(model, 2, 3, IDS)
    wanted = rows(mlp_output(full, IDS, 1)) @ transform
    found = rows(mlp_output(model, IDS, 1))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


@pytest.fixture(scope="module")
def documents():
    return [
        Document(f"doc-{number}", f"{number} in the hat, a cat and {number * 7919} others. " * 4)
        for number in range(60)
    ]


@pytest.fixture(scope="module")
def entry():
    return {
        "kind": "pruned",
        "base": "base",
        "remove": [[1, 2], [3, 5]],
        "calibration": {"corpus": "prose", "sequences": 6, "length": 20, "seed": 1},
    }


@pytest.fixture(scope="module")
def prepared(tiny_model, tokenizer, save_prepared, documents, entry, tmp_path_factory):
    """Folders of a base of six layers and of what is left of it without layers 1, 3 and 4."""
    directory = tmp_path_factory.mktemp("models")
    base, _ = save_prepared(directory, tiny_model("llama", 6, seed=3), tokenizer, "base")
    prepare_pruned("smaller", entry, base, documents, directory / "smaller")
    return base, directory / "smaller"


def test_a_prepared_pruned_model_has_a_card_of_its_own(prepared):
    base, smaller = (read_card(folder) for folder in prepared)
    assert smaller["model"] == "smaller"
    assert smaller["kind"] == "pruned"
    assert smaller["origin"] == "base without layers 1-1, 3-4"
    assert smaller["location"] == str(prepared[1])
    assert (base["layers"], smaller["layers"]) == (6, 3)
    assert smaller["parameters"] < base["parameters"]
    assert smaller["tokenizer_sha256"] == base["tokenizer_sha256"]
    assert smaller["weights_id"] != base["weights_id"]
    assert smaller["config_sha256"] != base["config_sha256"]


def test_a_prepared_pruned_model_loads_like_any_other(prepared, tiny_model, documents, entry):
    loaded = load_model(prepared[1])
    assert loaded.tokenizer.get_vocab() == load_model(prepared[0]).tokenizer.get_vocab()
    how = entry["calibration"]
    ids = draw_sequences(
        documents, loaded.tokenizer, Draw("fit", how["sequences"], how["length"], how["seed"]), "prose"
    )
    # Ranges are numbered as in the base: the last goes first.
    by_hand = tiny_model("llama", 6, seed=3)
    for first, end in ((3, 5), (1, 2)):
        remove_layers(by_hand, first, end, ids)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(input_ids=IDS).logits, by_hand(input_ids=IDS).logits, rtol=0, atol=1e-4)


def test_ranges_are_removed_whatever_their_order(prepared, documents, entry, tmp_path):
    prepare_pruned("smaller", entry | {"remove": [[3, 5], [1, 2]]}, prepared[0], documents, tmp_path / "smaller")
    assert read_card(tmp_path / "smaller")["weights_id"] == read_card(prepared[1])["weights_id"]
