"""The rules of a first run: k by layers, calibration by features, memory that the fit's own planning takes."""

import pytest

from kvferry.cli.settings import Wanted, plan_for, settings_for
from kvferry.config import Geometry
from kvferry.errors import KvferryError
from kvferry.fit.budget import MB, Sums, choice_of

SMALL, LARGE = Geometry(28, 8, 128), Geometry(36, 8, 128)
TINY = Geometry(3, 1, 8)


def settings(source=SMALL, target=LARGE, positions=40_960, **wanted):
    return settings_for(source, target, positions, Wanted(**wanted))


@pytest.mark.parametrize(
    ("layers", "ks", "headline"),
    [
        (1, (1,), 1),
        (3, (1, 2), 1),
        (6, (1, 2, 4), 2),
        (12, (1, 2, 4, 8), 4),
        (16, (1, 2, 4, 8, 16), 8),
        (80, (1, 2, 4, 8, 16), 8),
    ],
)
def test_k_follows_the_layers_of_the_source(layers, ks, headline):
    own = settings(Geometry(layers, 2, 16))
    assert (own.ks, own.headline) == (ks, headline)


def test_k_that_is_asked_for_is_sorted_and_unique():
    assert settings(k=(8, 1, 8, 3)).ks == (1, 3, 8)
    assert settings(k=(20, 24)).headline == 20


def test_k_beyond_the_layers_is_refused():
    with pytest.raises(KvferryError, match=r"--k: 29 is more than the 28 layers of the source; use at most 28"):
        settings(k=(1, 29))


def test_calibration_has_eight_rows_a_feature_within_bounds():
    own = settings()
    assert plan_for(SMALL, LARGE, own, own.headline).p_over_n == pytest.approx(0.125)
    assert settings(TINY, TINY).sequences == 24
    assert settings(Geometry(80, 64, 128)).sequences == 500
    assert settings(sequences=7).sequences == 7
    assert settings(sequences=1).held_out == 1


def test_the_fit_fits_the_memory_at_every_k():
    for shapes in ((SMALL, LARGE), (TINY, TINY), (Geometry(80, 8, 128), Geometry(80, 8, 128))):
        own = settings(*shapes)
        assert own.least_mb <= own.memory_mb
        for k in own.ks:
            sums = Sums.over(*shapes, k, own.sequences, own.calibration)
            assert choice_of(sums, own.memory_mb * MB, per_layer_only=True).passes >= 1
            assert plan_for(*shapes, own, k).note is None


def test_controls_are_for_targets_whose_map_to_themselves_fits():
    assert settings(TINY, TINY).with_identity
    assert not settings().with_identity


def test_short_models_get_short_text():
    own = settings(TINY, TINY, positions=128)
    assert own.length == 128
    assert own.prefix + own.scored <= 128
    assert settings().length == 512


def test_too_few_positions_are_refused():
    with pytest.raises(KvferryError, match="32 positions"):
        settings(TINY, TINY, positions=32)


@pytest.mark.parametrize(
    ("device", "dtype", "found"),
    [
        ("cpu", None, "float32"),
        ("cuda", None, "bfloat16"),
        ("cuda:1", None, "bfloat16"),
        ("cuda", "float16", "float16"),
    ],
)
def test_the_number_format_follows_the_device(device, dtype, found):
    assert settings(device=device, dtype=dtype).dtype == found


def test_a_gpu_gets_more_memory_for_fewer_passes():
    own, other = settings(device="cpu"), settings(device="cuda:0")
    assert (other.memory_mb, other.least_mb) == (16000, own.least_mb)
    passes = [plan_for(SMALL, LARGE, each, 8).moments.passes for each in (own, other)]
    assert passes[1] < passes[0]
