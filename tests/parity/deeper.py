"""A pair whose mapper is known: a model, and one of the same function with one layer more, and more and wider heads."""

import torch

# For each target layer the source layer whose keys and values it has; PASSING changes no hidden state.
ORDER = [0, 1, 1]
PASSING = 1


@torch.no_grad()
def deepen(source, target):
    """Make `target`, which has len(ORDER) layers, the same function as `source`.

    It may have a multiple of the source's KV heads (then the source's stand there several times) or of its head_dim (then what
    is added is zero, and every pair of coordinates is put where the wider rotary embedding turns at the same speed), and a
    larger vocabulary; biases, norms and widths are otherwise those of the source.
    """
    for own, other in (
        (source.get_input_embeddings(), target.get_input_embeddings()),
        (source.lm_head, target.lm_head),
    ):
        other.weight[: len(own.weight)] = own.weight
    target.model.norm.load_state_dict(source.model.norm.state_dict())
    for layer, number in zip(target.model.layers, ORDER, strict=True):
        own = source.model.layers[number]
        for name, module in own.named_children():
            if name != "self_attn":
                getattr(layer, name).load_state_dict(module.state_dict())
        _widen_attention(own.self_attn, layer.self_attn, source.config, target.config)
    passing = target.model.layers[PASSING]
    for module in (passing.self_attn.o_proj, passing.mlp.down_proj):
        module.weight.zero_()
    return target


def _widen_attention(own, other, config, wide):
    """Copy attention into one with more KV heads, or wider heads; scores are as before, though scaled by the wider head."""
    copies, stretch = wide.num_key_value_heads // config.num_key_value_heads, wide.head_dim // config.head_dim
    for name, module in own.named_children():
        twin, kv = getattr(other, name), name in ("k_proj", "v_proj")
        scale = stretch**0.5 if name == "q_proj" else 1.0
        for part, parameter in module.named_parameters():
            if name in ("q_norm", "k_norm"):
                assert stretch == 1
                twin.load_state_dict(module.state_dict())
            elif name == "o_proj":
                twin.weight.copy_(_widen(parameter.T, config.head_dim, stretch, 1).T)
            else:
                getattr(twin, part).copy_(scale * _widen(parameter, config.head_dim, stretch, copies if kv else 1))


def _widen(rows, dim, stretch, copies):
    """`[heads·dim, ...]` → `[heads·copies·dim·stretch, ...]`: halves of a head stay halves, zeros lie between coordinates."""
    heads = rows.unflatten(0, (-1, 2, dim // 2))
    wide = heads.new_zeros(*heads.shape[:2], stretch * dim // 2, *rows.shape[1:])
    wide[:, :, ::stretch] = heads
    return wide.flatten(1, 2).repeat_interleave(copies, 0).flatten(0, 1)
