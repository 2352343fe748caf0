"""Systems cut from the moments of a pair and systems summed for a layer alone are the same, and are direct weighted sums."""

import pytest
import torch
from sklearn.linear_model import Ridge
from small_fits import SIDES, affine, assert_close, dump_of, farthest, plain_cache, recipe, worst

from kvferry.errors import KvferryError
from kvferry.fit.pair import KINDS, Extent, accumulate
from kvferry.fit.ridge import fit_ridge
from kvferry.fit.rows import features, paired_shards
from kvferry.fit.systems import CutSystems, SummedSystems
from kvferry.fit.weights import RowRule

COUNT = len(SIDES["fit"])
RANKED = [[2, 0, 1], [1, 0, 2], [0, 1, 2], [2, 1, 0]]
ONE_PASS = [[0, 1, 2, 3]]
# Float32 products of 240 rows, summed in other chunks: 240 · 6e-8 at worst, relative to the largest entry.
ROUNDING = 2e-6
RULES = {
    "uniform": RowRule(),
    "sink": RowRule("sink", 4, 16.0),
    "left out": RowRule(left_out=3),
    "sink and left out": RowRule("sink", 4, 16.0, left_out=2),
}
over_rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.fixture(scope="module")
def models(tiny_model):
    return tiny_model("llama", 3, seed=1), tiny_model("llama", 4, seed=2, kv_heads=4)


@pytest.fixture(scope="module")
def dumps(models, tmp_path_factory):
    """The target's dump holds weights by attention too."""
    directory = tmp_path_factory.mktemp("dumps")
    return dump_of(models[0], directory, "small"), dump_of(models[1], directory, "big", row_weights=True)


@pytest.fixture(scope="module")
def moments(dumps):
    return accumulate(*dumps, Extent(COUNT, 4, "all", 1000))


def summed(dumps, rule=RULES["uniform"], count=COUNT, ranked=RANKED, groups=ONE_PASS, coupled=False):
    return SummedSystems(*dumps, count, rule, ranked, groups, coupled)


def every_system(systems, chosen):
    """All systems on the source layers chosen for each target layer, made ready group after group."""
    found = {}
    for layers in systems.groups:
        systems.prepare(layers)
        found |= {(kind, layer): systems.system(kind, layer, chosen[layer]) for kind in KINDS for layer in layers}
    return found


def assert_same(found, wanted, tolerance=ROUNDING):
    assert sorted(found) == sorted(wanted)
    for key, system in found.items():
        assert system.n == pytest.approx(wanted[key].n)
        assert farthest(system, wanted[key]) < tolerance, key


@over_rules
def test_summed_systems_are_those_that_are_cut(dumps, moments, rule):
    cut, own = CutSystems(moments, rule), summed(dumps, rule)
    assert_same(every_system(own, RANKED), every_system(cut, RANKED))
    assert (own.rows, own.source, own.target) == (cut.rows, cut.source, cut.target)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[3], [0, 2], [1]], [[0], [1], [2], [3]]])
def test_several_passes_give_what_one_gives(dumps, groups):
    passes, one = summed(dumps, groups=groups), summed(dumps)
    assert_same(every_system(passes, RANKED), every_system(one, RANKED), tolerance=1e-12)
    assert passes.rows == one.rows == SIDES["fit"].numel()


@pytest.mark.parametrize(
    "chosen", [[[2], [0], [1], [0]], [[0, 2], [2, 1], [1, 0], [1, 2]], [[0, 1, 2]] * 4], ids=["one", "two", "all"]
)
def test_any_layers_in_any_order_are_cut_from_what_was_summed(dumps, moments, chosen):
    assert_same(every_system(summed(dumps), chosen), every_system(CutSystems(moments, RowRule()), chosen))


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_ranked_layers_are_summed_as_if_there_were_no_more(dumps, moments, kind):
    short = [ranked[:2] for ranked in RANKED]
    found = every_system(summed(dumps, ranked=short), short)
    assert found[kind, 0].xx.shape == (32, 32)
    assert_same(found, every_system(CutSystems(moments, RowRule()), short))


@over_rules
def test_systems_are_direct_weighted_sums_over_the_rows(dumps, rule):
    pairs = list(paired_shards(*dumps, "fit"))
    weights = rule.by_position(torch.cat([pair[0].positions for pair in pairs]))
    for (kind, layer), system in every_system(summed(dumps, rule), RANKED).items():
        x = torch.cat([features(own, kind, RANKED[layer]) for own, _ in pairs])
        y = torch.cat([features(other, kind, [layer]) for _, other in pairs])
        assert worst(system, x, y, weights) < ROUNDING


def test_coupled_systems_are_those_of_keys_in_plain_caches(models, dumps):
    (own, _, own_values), (other, _, other_values) = (plain_cache(model, SIDES["fit"]) for model in models)
    rows = {"k": (own, other), "v": (own_values, other_values)}
    found = every_system(summed(dumps, coupled=True), RANKED)
    for (kind, layer), system in found.items():
        x, y = rows[kind][0][:, RANKED[layer]].flatten(1), rows[kind][1][:, layer].flatten(1)
        # float32 forwards of another batch size
        assert worst(system, x, y) < 1e-4
    plain = every_system(summed(dumps), RANKED)
    assert farthest(found["k", 0], plain["k", 0]) > 1e-2
    assert farthest(found["v", 0], plain["v", 0]) == 0


@pytest.mark.parametrize("count", [3, 8, 9])
def test_fewer_sequences_are_as_dumps_of_just_these(models, dumps, tmp_path, count):
    sides = SIDES | {"fit": SIDES["fit"][:count]}
    short = [dump_of(model, tmp_path, name, sides=sides) for model, name in zip(models, ("small", "big"), strict=True)]
    found, wanted = summed(dumps, RULES["sink"], count), summed(short, RULES["sink"], count)
    # The target's dump with weights comes from attention that sums in another order.
    assert_same(every_system(found, RANKED), every_system(wanted, RANKED), tolerance=1e-4)
    assert found.rows == wanted.rows == SIDES["fit"][:count].numel()


def test_more_sequences_than_there_are_are_refused(dumps):
    with pytest.raises(KvferryError, match="holds 10 sequences, 11 are asked for"):
        summed(dumps, count=COUNT + 1).prepare([0])


@over_rules
def test_rows_that_weigh_nothing_are_not_counted(dumps, moments, rule):
    wanted = SIDES["fit"].numel() - COUNT * rule.left_out
    own = summed(dumps, rule)
    own.prepare([0])
    assert CutSystems(moments, rule).rows == own.rows == wanted


def test_layers_that_read_all_share_one_gram(moments):
    systems = CutSystems(moments, RowRule())
    assert systems.system("k", 0, [0, 1, 2]).xx is systems.system("k", 3, [0, 1, 2]).xx
    assert systems.system("k", 0, [0, 1, 2]).xx is not systems.system("v", 0, [0, 1, 2]).xx


def test_fits_on_either_are_the_same(dumps, moments):
    recipes = {
        "k1": recipe(k=1),
        "k3": recipe(1.0, k=3, lambda_scale="sum"),
        "same": recipe(k=2, lambda_scale="trace"),
        "all": recipe(k="all"),
    }
    cut = fit_ridge(CutSystems(moments, RULES["sink"]), RANKED, recipes)
    other = fit_ridge(summed(dumps, RULES["sink"], groups=[[0, 1, 2], [3]]), RANKED, recipes)
    for name in recipes:
        assert cut[name].mapper.selected == other[name].mapper.selected
        for kind in KINDS:
            assert other[name].r2[kind] == pytest.approx(cut[name].r2[kind], abs=1e-4)
            for layer in range(4):
                # what the products round is magnified by the condition of the system, some hundreds here
                assert_close(affine(other[name], kind, layer)[0], affine(cut[name], kind, layer)[0], 1e-3)


def attention_rows(dumps, kind, layer):
    """Features, outputs and weights of all fit rows for one target layer, float64."""
    pairs = list(paired_shards(*dumps, "fit"))
    x = torch.cat([features(own, kind, RANKED[layer]) for own, _ in pairs])
    y = torch.cat([features(other, kind, [layer]) for _, other in pairs])
    weights = [(other.key_weights if kind == "k" else other.value_weights)[layer].double().sum(1) for _, other in pairs]
    return x.double(), y.double(), torch.cat(weights)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_weighs_each_target_layer_and_kind_by_its_own(dumps, kind):
    found = every_system(summed(dumps, RowRule("attention")), RANKED)
    seen = []
    for layer in range(4):
        x, y, weights = attention_rows(dumps, kind, layer)
        assert worst(found[kind, layer], x, y, weights) < ROUNDING
        seen.append(weights / weights.sum())
    assert min(float((one - seen[0]).abs().max()) for one in seen[1:]) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left_out", [0, 3])
def test_a_fit_by_attention_is_weighted_least_squares(dumps, kind, left_out):
    own = recipe(k=3, dtype="float64", row_weights="attention", native_head=left_out, head_rows="left_out")
    fit = fit_ridge(summed(dumps, RowRule.of(own)), RANKED, {"own": own})["own"]
    kept = SIDES["fit"].shape[1] - left_out
    for layer in range(4):
        x, y, weights = (
            part.view(COUNT, -1, *part.shape[1:])[:, left_out:] for part in attention_rows(dumps, kind, layer)
        )
        x, y, weights = (part.reshape(COUNT * kept, -1).numpy() for part in (x, y, weights))
        alpha = own["lambda"] * weights.sum()
        wanted = Ridge(alpha=alpha, solver="cholesky").fit(x, y, sample_weight=weights[:, 0])
        weight, bias = affine(fit, kind, layer)
        # float32 products, magnified by the condition of the system
        assert_close(weight, wanted.coef_.T, 1e-4)
        assert_close(bias, wanted.intercept_, 1e-4)


def test_attention_needs_a_dump_that_has_it(models, dumps, tmp_path):
    bare = dump_of(models[1], tmp_path, "big")
    with pytest.raises(KvferryError, match="the target's dump has no attention weights; delete it and run again"):
        summed((dumps[0], bare), RowRule("attention")).prepare([0])
