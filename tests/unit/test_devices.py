"""Places as a config names them: which role's model goes where, and how many GPUs a job asks for."""

import pytest

from kvferry.devices import DEVICE, SOURCE, TARGET, devices_in, first_of, gpus_of, kinds_of, place_of

TWO = ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("place", "devices"), [("cpu", ["cpu"]), ("cuda", ["cuda:0"]), ("cuda:3", ["cuda:3"]), (TWO[::-1], TWO[::-1])]
)
def test_the_devices_of_a_place(place, devices):
    assert devices_in(place) == devices


def test_a_role_without_a_place_of_its_own_takes_the_device():
    compute = {"device": TWO, "source_device": "cuda:2"}
    assert [place_of(compute, role) for role in (DEVICE, SOURCE, TARGET)] == [TWO, "cuda:2", TWO]
    assert first_of(compute) == "cuda:0"


@pytest.mark.parametrize(
    ("compute", "alone", "pair"),
    [
        ({"device": "cpu"}, 0, 0),
        ({"device": "cuda"}, 1, 1),
        ({"device": "cuda", "source_device": "cuda:0", "target_device": "cuda:1"}, 1, 2),
        ({"device": TWO}, 2, 2),
        ({"device": TWO, "source_device": "cuda:2"}, 2, 3),
        ({"device": "cuda:0", "target_device": ["cuda:0", "cuda:1", "cuda:2"]}, 1, 3),
        ({"device": "cpu", "target_device": "cuda"}, 0, 1),
    ],
)
def test_a_job_asks_for_the_gpus_that_its_models_are_on(compute, alone, pair):
    assert (gpus_of(compute, [DEVICE]), gpus_of(compute, [SOURCE, TARGET])) == (alone, pair)


def test_the_kind_of_a_device_does_not_depend_on_numbers():
    few, many = {"device": "cuda"}, {"device": ["cuda:1", "cuda:2"], "source_device": "cuda:5"}
    assert kinds_of(few) == kinds_of(many) != kinds_of({"device": "cuda", "source_device": "cpu"})
