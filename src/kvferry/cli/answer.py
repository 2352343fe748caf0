"""The answer of `kvferry check` on a pair, as text and as JSON. Does not know where models come from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any

from kvferry.cli.expected import FORMULA, Expected, expected
from kvferry.cli.feasibility import Feasibility, facts
from kvferry.cli.settings import Settings, Wanted, plan_for, settings_for
from kvferry.columns import aligned
from kvferry.planner import Plan

PREFIXES = ("", "k", "M", "G", "T", "P")
COLD = "Where the source has to read the prompt first (cold), its own prefill counts too; a run measures both."


@dataclass(frozen=True)
class Outlook:
    """What a pair that can transfer takes and saves: by k the plan of its mapper, and the speed-up of the headline."""

    settings: Settings
    plans: dict[int, Plan]
    speed: list[Expected]

    @staticmethod
    def of(pair: Feasibility) -> Outlook:
        """In the run that `kvferry new` would write for the pair."""
        shapes = pair.source.geometry, pair.target.geometry
        settings = settings_for(*shapes, pair.positions, Wanted())
        plans = {k: plan_for(*shapes, settings, k) for k in settings.ks}
        speed = expected(pair.source, pair.target, plans[settings.headline], settings.dtype)
        return Outlook(settings, plans, speed)


def as_json(pair: Feasibility) -> dict[str, Any]:
    """All that is found: numbers, bytes and FLOPs. What only a pair that can transfer has is absent from another one's."""
    found = {
        "transferable": not pair.faults,
        "reasons": pair.faults,
        "source": {"name": pair.source.name, **facts(pair.source)},
        "target": {"name": pair.target.name, **facts(pair.target)},
        "tokenizer_differences": pair.tokenizer_differences,
    }
    if pair.faults:
        return found
    outlook = Outlook.of(pair)
    return found | {
        "matched_kv": pair.matched,
        "calibration": {**outlook.settings.calibration, "dtype": outlook.settings.dtype},
        "mappers": [_plan_json(plan) for plan in outlook.plans.values()],
        "speed_up": {"k": outlook.settings.headline, "lengths": [_speed_json(own) for own in outlook.speed]},
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "k": plan.k,
        "parameters": plan.parameters,
        "bytes": plan.storage_bytes,
        "features": plan.features,
        "p_over_n": plan.p_over_n,
        "source_dump_bytes": plan.source_dump_bytes,
        "target_dump_bytes": plan.target_dump_bytes,
        "fit_memory_bytes": plan.moments and plan.moments.bytes,
        "fit_flops": None if plan.moments_flops is None else plan.moments_flops + plan.solve_flops,
        "apply_flops_a_token": plan.apply_flops,
    }


def _speed_json(own: Expected) -> dict[str, Any]:
    return {**asdict(own), "by_flops": own.by_flops, "by_bytes": own.by_bytes}


def as_text(pair: Feasibility) -> str:
    """All that is found, for people."""
    parts = [_models(pair), _verdict(pair)]
    if not pair.faults:
        outlook = Outlook.of(pair)
        parts += [_mappers(outlook), _calibration(outlook), _speed(outlook)]
        parts.append(f"Next: kvferry new NAME --source {quote(pair.source.name)} --target {quote(pair.target.name)}")
    return "\n\n".join(parts)


def _models(pair: Feasibility) -> str:
    own, other = facts(pair.source), facts(pair.target)
    rows = [[what, _cell(own[what]), _cell(other[what])] for what in own]
    if not pair.faults:
        rows.append(["parameters", _cell(pair.source.weights.total), _cell(pair.target.weights.total)])
    return aligned("Models", [["", "source", "target"], ["", pair.source.name, pair.target.name]], rows, names=3)


def _cell(value: Any) -> str:
    """`none` where a config says nothing."""
    if value is None:
        return "none"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def _verdict(pair: Feasibility) -> str:
    """Tokenizers, shapes, and whether the pair can transfer."""
    differences = pair.tokenizer_differences
    tokens = "not compared" if differences is None else "; ".join(differences) or "identical"
    if pair.faults:
        return "\n".join([f"Tokenizers: {tokens}.", "Cannot transfer:", *(f"- {fault}." for fault in pair.faults)])
    own, other = (f"{each.kv_heads} heads of {each.head_dim}" for each in (pair.source.geometry, pair.target.geometry))
    shape = f"matched ({own})" if pair.matched else f"mismatched ({own} and {other}), mapped from all heads to all"
    return f"Tokenizers: {tokens}.\nKV of a layer: {shape}.\nCan transfer{_remark(pair)}."


def _remark(pair: Feasibility) -> str:
    """What a name given twice means."""
    same = pair.source.name == pair.target.name
    return "; but this is one model, which can go on from its own cache without a mapper" if same else ""


def _mappers(outlook: Outlook) -> str:
    head = [["k", "parameters", "storage", "features p", "p/n", "a token"]]
    rows = [
        [
            str(k),
            f"{plan.parameters:,}",
            amount(plan.storage_bytes, "B"),
            f"{plan.features:,}",
            f"{plan.p_over_n:.3f}",
            amount(plan.apply_flops, "FLOP"),
        ]
        for k, plan in outlook.plans.items()
    ]
    return aligned("Mapper by k, in float32, biases aside; p/n near 1 would fit noise", head, rows, names=0)


def _calibration(outlook: Outlook) -> str:
    """What the run takes that makes all these mappers."""
    settings, one = outlook.settings, outlook.plans[outlook.settings.headline]
    text = f"{settings.sequences} sequences of {settings.length} tokens, and {settings.held_out} held out"
    lines = [
        f"Calibration on {text}, in {settings.dtype}",
        f"disk    {amount(one.source_dump_bytes, 'B')} of the source's keys and values, "
        f"{amount(one.target_dump_bytes, 'B')} of the target's",
    ]
    summed = [plan.moments for plan in outlook.plans.values() if plan.moments]
    if summed and one.moments_flops:
        most = max(summed, key=lambda choice: choice.bytes)
        lines += [
            f"memory  {amount(most.bytes, 'B')} for the moments and their solution (fit.memory_mb: {settings.memory_mb})",
            f"work    {amount(one.moments_flops + one.solve_flops, 'FLOP')} for the fit at k = {one.k}",
        ]
    return "\n".join(lines)


def _speed(outlook: Outlook) -> str:
    head = [
        ["", "FLOPs", "FLOPs", "", "bytes", "bytes", "", ""],
        ["tokens", "prefill", "mapper", "ratio", "prefill", "mapper", "ratio", ""],
    ]
    rows = [
        [
            f"{own.tokens:,}",
            amount(own.prefill_flops),
            amount(own.mapper_flops),
            f"{own.by_flops:.2f}",
            amount(own.prefill_bytes),
            amount(own.mapper_bytes),
            f"{own.by_bytes:.2f}",
            own.beyond or "",
        ]
        for own in outlook.speed
    ]
    title = (
        "Expected speed-up where the source's cache is already there (warm): the target's prefill over the mapper at "
        f"k = {outlook.settings.headline}"
    )
    return f"{aligned(title, head, rows, names=0)}\n{FORMULA}\n{COLD}"


def amount(value: float, unit: str = "") -> str:
    """Three significant digits with a prefix, and the unit: 1,234,567 is `1.23 M`."""
    step = 0
    while value >= 999.5 and step < len(PREFIXES) - 1:
        value, step = value / 1000, step + 1
    digits = max(0, 2 - (value >= 9.995) - (value >= 99.95)) if step else 0
    return f"{value:.{digits}f} {PREFIXES[step]}{unit}".rstrip()
