"""A pair of tiny models with a mapper that knows nothing, and the part of a config that timing and native tokens read."""

import torch

from kvferry.evaluate.mapped import Mapped
from kvferry.kv.mapper import Affine, Mapper, save_mapper

PAIR, VARIANT = "small-to-large", "random"


def save_random_mapper(directory, source, target, seed=0):
    """A mapper of random weights: target layer l reads the source layer of that number, or the last one."""
    torch.manual_seed(seed)
    layers, last = target.card["layers"], source.card["layers"] - 1
    width = target.card["kv_heads"] * target.card["head_dim"]
    keys, values = (
        [Affine(torch.randn(width, width) / 4, torch.randn(width)) for _ in range(layers)] for _ in range(2)
    )
    mapper = Mapper([[min(layer, last)] for layer in range(layers)], keys, values, target.card["kv_heads"])
    save_mapper(mapper, {"source": source.card, "target": target.card}, directory)
    return directory


def mapped_pair(source, target, directory, outputs, native_head=0):
    return Mapped(PAIR, VARIANT, source, target, directory, outputs, native_head)


def timing_config(**changes):
    """A config of a few fast trials; `changes` are of its latency section."""
    latency = {"lengths": [8], "warm_up": 0, "trials": 3, "seconds": 1000, "batch": 1}
    return {
        "evaluation": {"seed": 1, "hold_back": 1, "batch_tokens": 500, "max_new_tokens": 6, "cache_mb": 100},
        "compute": {"device": "cpu", "dtype": "float32"},
        "latency": latency | changes,
    }
