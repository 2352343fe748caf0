"""Which module goes on which device, that a model loads so and computes the same, and that a device that is not there is said."""

import pytest
import torch
import transformers.modeling_utils
from pretended import GPUS, pretended_devices
from transformers import AutoModelForCausalLM

from kvferry.errors import KvferryError
from kvferry.kv.cache import devices_of, layer_devices
from kvferry.prepare.models import load_model
from kvferry.prepare.placement import check_there, device_map, settle, shares, spread, usable

TWO = ["cuda:0", "cuda:1"]
IDS = torch.arange(3, 15)[None]


@pytest.mark.parametrize(
    ("layers", "first", "devices", "wanted"),
    [
        (80, 0.0, 2, [40, 40]),
        (80, 4.0, 2, [38, 42]),
        (7, 0.0, 3, [2, 3, 2]),
        (4, 10.0, 2, [0, 4]),
        (3, 0.0, 4, [1, 1, 1, 0]),
    ],
)
def test_devices_get_about_as_much_each(layers, first, devices, wanted):
    assert shares(layers, first, devices) == wanted


@pytest.mark.parametrize("kind", ["llama", "qwen3", "partial"])
def test_every_module_has_a_device_and_all_but_layers_are_on_the_first(kind, tiny_model):
    model = tiny_model(kind, 4)
    devices = spread(model, TWO)
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    owners = {name: [own for own in devices if name.startswith(f"{own}.")] for name in names}
    assert all(len(own) == 1 for own in owners.values()), owners
    assert {devices[own] for own in devices if ".layers." not in own} == {"cuda:0"}
    order = [devices[f"model.layers.{number}"] for number in range(4)]
    assert order == sorted(order)
    assert "cuda:1" in order


def test_one_device_is_no_map_of_modules(tmp_path):
    assert device_map(tmp_path, "cpu") is None
    assert device_map(tmp_path, "cuda") == {"": "cuda:0"}
    assert device_map(tmp_path, ["cuda:2"]) == {"": "cuda:2"}


@pytest.fixture
def gpus(monkeypatch):
    """Say how many GPUs there are."""

    def there(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return there


@pytest.mark.parametrize(
    ("count", "place", "words"),
    [
        (0, "cuda", "cuda:0 is asked for, but torch sees no CUDA device here; set it to cpu"),
        (0, TWO, "cuda:0 is asked for, but torch sees no CUDA device here; set it to cpu"),
        (1, TWO, "cuda:1 is asked for, but only cuda:0 is there; name fewer devices, or give the job more GPUs"),
        (2, "cuda:2", "cuda:2 is asked for, but only cuda:0 to cuda:1 are there"),
    ],
)
def test_a_device_that_is_not_there_is_said_in_one_sentence(count, place, words, gpus, tmp_path):
    gpus(count)
    for ask in (check_there, lambda place: load_model(tmp_path, place)):
        with pytest.raises(KvferryError, match=words) as caught:
            ask(place)
        assert "\n" not in str(caught.value)


def test_the_fit_has_its_device_checked_too(gpus):
    gpus(0)
    assert usable("cpu") == torch.device("cpu")
    with pytest.raises(KvferryError, match="no CUDA device"):
        usable("cuda:0")


@pytest.fixture
def loadable(monkeypatch, gpus):
    """What loading asks of CUDA itself is left out: room made beforehand, and threads, in which nothing is pretended."""
    gpus(3)
    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", lambda *_, **__: None)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


@pytest.mark.parametrize(("place", "homes"), [(TWO, (0, 1, 1, 1)), (["cuda:2", "cuda:0"], (2, 0, 0, 0))])
def test_a_model_loads_onto_its_devices_and_computes_the_same(
    place, homes, loadable, tiny_model, tokenizer, save_prepared, tmp_path
):
    own = tiny_model("qwen3", 4)
    folder, _ = save_prepared(tmp_path, own, tokenizer, "own")
    with pretended_devices(), torch.inference_mode():
        model = load_model(folder, place).model
        assert layer_devices(model) == [GPUS[number] for number in homes]
        assert model.device == GPUS[homes[0]]
        assert devices_of(model) == list(dict.fromkeys(GPUS[number] for number in homes))
        ends = torch.tensor([[4, 9]], device=model.device)
        output = model(IDS.to(model.device), use_cache=True, logits_to_keep=ends)
        assert output.logits.device == model.device
        assert [layer.keys.device for layer in output.cache.layers] == layer_devices(model)
        found = output.logits.cpu()
    with torch.inference_mode():
        torch.testing.assert_close(found, own(IDS).logits[:, [4, 9]], rtol=1e-5, atol=1e-5)


def test_inputs_are_taken_on_the_first_device_whatever_loading_chose(
    loadable, tiny_model, tokenizer, save_prepared, tmp_path
):
    folder, _ = save_prepared(tmp_path, tiny_model("llama", 4), tokenizer, "own")
    place = ["cuda:0", "cuda:1", "cuda:2"]
    with pretended_devices():
        model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map(folder, place))
        model._hf_hook.execution_device = "cuda:2"
        settle(model, place)
        assert model._hf_hook.execution_device == "cuda:0"
