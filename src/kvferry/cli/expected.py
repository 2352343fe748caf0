"""What a warm hand-off saves, from floating-point operations (FLOPs) and bytes alone: no machine, nothing is run.

For a prompt of T tokens, one sequence, whose source cache is already there:

    prefill of the target:  2·P·T + 2·L·H·d·T²  FLOPs,   P·b + T·c_t        bytes
    mapper:                 2·M·T               FLOPs,   M·b_m + T·(c_s + c_t)  bytes

P: weights that multiply every token (matrices without embeddings and output head, which reads the last token alone; of a mixture,
the experts that a token goes through; P·b counts all weights but those two). L, H, d: layers, query heads, numbers of a head;
attention is causal, half of 4·T² a number. M: weights of the mapper. b, b_m: bytes of a weight. c_s, c_t: bytes of a token's keys
and values. Weights are read once, caches read or written once. Where arithmetic bounds both, the speed-up is the ratio of FLOPs;
where memory does, that of bytes; on a machine whose time is the larger of the two, it lies between the ratios. Rotation,
activations, the held-back tokens and all overhead are left out, so that real speed-ups are lower for short prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.candidates import Candidate
from kvferry.devices import SIZE_OF
from kvferry.planner import Plan

LENGTHS = (512, 4096, 32768)
FORMULA = """\
FLOPs of T tokens: prefill 2·P·T + 2·layers·heads·head_dim·T² (P: weights without embeddings), mapper 2·parameters·T.
Bytes: weights and caches, each once. The speed-up lies between the two ratios: near that of FLOPs where arithmetic is the limit,
near that of bytes where memory is."""


@dataclass(frozen=True)
class Expected:
    """FLOPs and bytes of the target's prefill and of the mapper for a prompt of `tokens`.

    beyond: what the prompt is too long for, or None.
    """

    tokens: int
    prefill_flops: int
    mapper_flops: int
    prefill_bytes: int
    mapper_bytes: int
    beyond: str | None

    @property
    def by_flops(self) -> float:
        """Speed-up where arithmetic bounds both."""
        return self.prefill_flops / self.mapper_flops

    @property
    def by_bytes(self) -> float:
        """Speed-up where memory bounds both."""
        return self.prefill_bytes / self.mapper_bytes


def expected(
    source: Candidate, target: Candidate, plan: Plan, dtype: str, lengths: Sequence[int] = LENGTHS
) -> list[Expected]:
    """For each length; dtype: of the target's weights and of both caches."""
    return [_at(tokens, source, target, plan, dtype) for tokens in lengths]


def _at(tokens: int, source: Candidate, target: Candidate, plan: Plan, dtype: str) -> Expected:
    shape, weights = target.geometry, target.weights
    written = tokens * shape.token_bytes(SIZE_OF[dtype])
    attention = 2 * shape.layers * target.query_heads * shape.head_dim * tokens**2
    return Expected(
        tokens=tokens,
        prefill_flops=2 * weights.a_token * tokens + attention,
        mapper_flops=plan.apply_flops * tokens,
        prefill_bytes=weights.inside * SIZE_OF[dtype] + written,
        mapper_bytes=plan.storage_bytes + tokens * source.geometry.token_bytes(SIZE_OF[dtype]) + written,
        beyond=_beyond(tokens, source, target),
    )


def _beyond(tokens: int, source: Candidate, target: Candidate) -> str | None:
    """The model that has fewest positions, where they are too few."""
    least = min(source, target, key=lambda model: model.positions)
    return f"beyond the {least.positions:,} positions of {least.name}" if tokens > least.positions else None
