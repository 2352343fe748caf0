"""What the tests of fits share: dumps of tiny models, rows and moments made of numbers, recipes."""

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.metrics import r2_score

from kvferry.files import sha256_file, write_json
from kvferry.fit.moments import FIELDS, Moments
from kvferry.fit.pair import KINDS, PairMoments
from kvferry.fit.ridge import fit_ridge
from kvferry.fit.systems import CutSystems
from kvferry.fit.weights import RowRule
from kvferry.kv.dump import INDEX, write_dump
from kvferry.kv.rope import rotation

LENGTH = 24
HOW = {"stride": 1, "seed": 3, "length": LENGTH}
SIDES = {
    "fit": torch.randint(3, 260, (10, LENGTH), generator=torch.Generator().manual_seed(1)),
    "held_out": torch.randint(3, 260, (9, LENGTH), generator=torch.Generator().manual_seed(2)),
}
RECIPE = {
    "method": "ridge",
    "k": 2,
    "lambda": 0.01,
    "lambda_scale": "token",
    "rope": "stripped",
    "support": "all_heads",
    "row_weights": "uniform",
    "sink_positions": 4,
    "sink_weight": 16.0,
    "native_head": 0,
    "head_rows": "kept",
    "corpus": "prose",
    "sequences": len(SIDES["fit"]),
    "dtype": "float32",
}
SOURCE = {"layers": 3, "kv_heads": 2, "head_dim": 2}
TARGET = {"layers": 2, "kv_heads": 3, "head_dim": 2}


def recipe(value=RECIPE["lambda"], **changes):
    """A recipe with a penalty of this value."""
    return RECIPE | {"lambda": value} | changes


def dump_of(model, directory, name="model", how=HOW, sides=SIDES, tokenizer="same", row_weights=False):
    """Dump `model` to `directory / name`, with a card as far as a dump needs one."""
    config = model.config
    card = {
        "model": name,
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "config_sha256": f"config of {name}",
        "tokenizer_sha256": tokenizer,
        "weights_id": f"weights of {name}",
        "origin": "of a test",
    }
    write_dump(model, card, sides, how, directory / name, row_weights=row_weights)
    return directory / name


def write_rows(directory, rows, geometry):
    """A dump of given keys and values, `[rows, layers·kv_heads·head_dim]` a side and kind, with a rotation that does nothing."""
    shape = (-1, geometry["layers"], geometry["kv_heads"], geometry["head_dim"])
    shards = []
    directory.mkdir()
    for side, kinds in rows.items():
        parts = {kind: part.float().view(shape) for kind, part in kinds.items()}
        n, layers = parts["k"].shape[:2]
        tensors = {f"{kind}.{i}": part[:, i].contiguous() for kind, part in parts.items() for i in range(layers)}
        tensors |= {name: torch.arange(n) for name in ("ids", "positions")} | {"sequences": torch.zeros(n).long()}
        tensors |= {"cos": torch.ones(n, geometry["head_dim"]), "sin": torch.zeros(n, geometry["head_dim"])}
        path = directory / f"{side}.safetensors"
        save_file(tensors, path)
        shards.append({"file": path.name, "side": side, "sequences": 1, "sha256": sha256_file(path)})
    identity = {"model": directory.name, "tokenizer_sha256": "same"}
    write_json(directory / INDEX, {"identity": identity, "geometry": geometry, "calibration": HOW, "shards": shards})
    return directory


def plain_cache(model, ids):
    """Keys with RoPE, keys without and values, float64 `[rows, layers, kv_heads, head_dim]`, from one plain forward."""
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True)["cache"]
    turned = rotation(model, torch.arange(ids.shape[1])[None])
    cos, sin = (table[0].double() for table in (turned.cos, turned.sin))
    keys, values = (
        torch.stack([getattr(layer, kind) for layer in cache.layers]).double().permute(1, 3, 0, 2, 4)
        for kind in ("keys", "values")
    )
    first, second = keys.chunk(2, dim=-1)
    cos, sin = (table[None, :, None, None, : first.shape[-1]] for table in (cos, sin))
    without = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    return [part.flatten(0, 1) for part in (keys, without, values)]


def direct(x, y, weights=None):
    """The definition, in float64: mean first, then centred products."""
    x, y = x.double(), y.double()
    weights = torch.ones(len(x)) if weights is None else weights
    w = weights.double()[:, None]
    means = [(part * w).sum(0) / w.sum() for part in (x, y)]
    centred_x, centred_y = x - means[0], y - means[1]
    return {
        "mean_x": means[0],
        "mean_y": means[1],
        "xx": centred_x.T @ (w * centred_x),
        "xy": centred_x.T @ (w * centred_y),
        "yy": (w * centred_y.square()).sum(0),
    }


def worst(moments, x, y, weights=None):
    """Largest error of any field against the definition, relative to the largest entry of the field."""
    return farthest(moments, Moments(**direct(x, y, weights)))


def farthest(moments, wanted):
    """Largest difference of any field of two moments, relative to the largest entry of the field."""
    pairs = [(getattr(moments, name), getattr(wanted, name)) for name in FIELDS]
    assert all(one.shape == other.shape for one, other in pairs)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def width(geometry):
    """Columns of all layers."""
    return geometry["layers"] * geometry["kv_heads"] * geometry["head_dim"]


def pair_rows(n=60, seed=0, source=SOURCE, target=TARGET):
    """Source and target rows in float64, of keys and of values, that depend on each other and have means that are not zero."""
    random = torch.Generator().manual_seed(seed)
    rows = {}
    for kind in KINDS:
        x = torch.randn(n, width(source), generator=random).double() * 2 + 1
        noise = torch.randn(n, width(target), generator=random).double()
        rows[kind] = x, x @ torch.randn(width(source), width(target), generator=random).double() + noise - 4
    return rows


def moments_of(rows, source=SOURCE, target=TARGET, weights=None):
    """Moments over all columns of given rows, in the precision of the rows."""
    full = {kind: Moments.of(*rows[kind], weights) for kind in KINDS}
    return PairMoments(source, target, len(rows["k"][0]), full, None)


def layer_rows(rows, kind, layer, chosen, source=SOURCE, target=TARGET):
    """Features of the chosen source layers, in their order, and outputs of a target layer, as numpy arrays."""
    x, y = rows[kind]
    features = x.view(len(x), source["layers"], -1)[:, chosen].flatten(1)
    return features.numpy(), y.view(len(y), target["layers"], -1)[:, layer].numpy()


def fitted(moments, ranking, own):
    """The fit of one recipe."""
    return fit_ridge(CutSystems(moments, RowRule()), ranking, {"own": own})["own"]


def affine(fit, kind, layer):
    """Weight and bias of one map."""
    found = (fit.mapper.keys if kind == "k" else fit.mapper.values)[layer]
    return found.weight.double().numpy(), found.bias.double().numpy()


def assert_close(found, wanted, tolerance):
    """Errors relative to the largest entry."""
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def pooled_r2(truth, predicted, heads):
    """1 − SSE/SST over all coordinates of a head together, averaged over heads, by scikit-learn."""
    pairs = zip(np.split(truth, heads, axis=1), np.split(predicted, heads, axis=1), strict=True)
    return np.mean([r2_score(*pair, multioutput="variance_weighted") for pair in pairs])


def flip_a_byte(path):
    """Change the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
