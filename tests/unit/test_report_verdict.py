"""Verdicts: tiers from intervals, the table's row, and a page that says what to do or what was not measured."""

from dataclasses import replace

import pytest
from test_report_controls import row, with_records
from test_report_inputs import CONFIG, PAIRS, accuracy_items, build, only, write_measures, write_native, write_transfer
from test_report_sweeps import PAIR, build_swept, load

from kvferry.records import ATTENTION_COSINE, LATENCY, NEXT_TOKEN_KL, RANDOM_MAPPER, Item, Record
from kvferry.report.inputs import Results
from kvferry.report.tables import write_table
from kvferry.report.tables.verdict import NEVER, NOT_MEASURED, verdict
from kvferry.report.verdict import NOT_DECIDED, TIERS, verdict_of
from kvferry.report.verdict_page import page, write_pages

FIVE = ("arc_challenge", "hellaswag", "winogrande", "mmlu", "gsm8k")
KEEPS, PART, LOSES = (tier.name for tier in TIERS)
# ms by length: mapper, source prefill, target prefill. Warm pays from 512 on, cold from 2,048 on.
TIMES = {128: (20, 10, 10), 512: (20, 30, 40), 2048: (40, 60, 160)}


def latency(times=TIMES, load=300.0):
    items = [
        Item(f"{what}/{length}/{trial}", value + jitter)
        for length, own in times.items()
        for what, value in zip(("mapper", "source_prefill", "target_prefill"), own, strict=True)
        for trial, jitter in enumerate((0.0, -1.0, 1.0))
    ]
    items += [Item(f"load/0/{trial}", load) for trial in range(3)]
    return Record("ridge_k8", "big", LATENCY, "ms", items, pair=PAIR, source="small")


def cosine(value, spread=0.0, texts=8):
    items = [Item(f"text-{i}-ab", value + (spread if i % 2 else -spread)) for i in range(texts)]
    return Record("ridge_k8", "big", ATTENTION_COSINE, ATTENTION_COSINE, items, pair=PAIR, source="small")


def judged(results, *records):
    """The results with these records of the headline."""
    more = {(PAIR, "ridge_k8", record.benchmark): record for record in records}
    whole = replace(with_records(results), transfers={**results.transfers, **more})
    object.__setattr__(whole, "held_out_benchmarks", [])
    return whole


def answered(root, correct, n=100):
    """The results where the headline has `correct` of `n` right on every benchmark, the target all, and the source 60 %."""
    build(root)
    for name in FIVE:
        write_native(root, "big", name, accuracy_items(n, n))
        write_native(root, "small", name, accuracy_items(6 * n // 10, n))
        write_transfer(root, "ridge_k8", name, accuracy_items(correct, n))
    return Results.load(root, CONFIG, PAIRS)


@pytest.mark.parametrize(
    ("correct", "tier"), [(99, KEEPS), (88, PART), (70, LOSES), (95, NOT_DECIDED), (80, NOT_DECIDED)]
)
def test_the_tier_is_that_of_the_whole_interval_of_retention(tmp_path, correct, tier):
    results = judged(answered(tmp_path, correct))
    own = verdict_of(results, results.pairs[0])
    assert own.retention.value == pytest.approx(correct / 100)
    assert own.tier == tier


@pytest.mark.parametrize(
    ("correct", "value", "spread", "tier"),
    [
        (99, 0.97, 0.0, KEEPS),
        (99, 0.80, 0.0, PART),
        (99, 0.30, 0.0, LOSES),
        (70, 0.99, 0.0, LOSES),
        (99, 0.90, 0.05, NOT_DECIDED),
        # Whatever the cosine's interval leaves open, retention has decided.
        (70, 0.90, 0.05, LOSES),
        (88, 0.90, 0.05, PART),
    ],
)
def test_retention_and_cosine_must_both_be_good_enough(tmp_path, correct, value, spread, tier):
    results = judged(answered(tmp_path, correct), cosine(value, spread))
    assert verdict_of(results, results.pairs[0]).tier == tier


def test_few_items_decide_nothing_where_many_do(tmp_path):
    tiers = []
    for n in (20, 1000):
        results = judged(answered(tmp_path / str(n), 9 * n // 10, n))
        tiers.append(verdict_of(results, results.pairs[0]).tier)
    assert tiers == [NOT_DECIDED, PART]


def test_hellaswag_judges_where_not_all_five_were_run(tmp_path):
    results = judged(Results.load(build(tmp_path), only("hellaswag", "mmlu"), PAIRS))
    own = verdict_of(results, results.pairs[0])
    assert own.names == ("hellaswag",)
    assert own.retention.value == pytest.approx(75 / 90)
    assert own.gap.value == pytest.approx(0.5)
    without = judged(Results.load(tmp_path, only("mmlu"), PAIRS))
    own = verdict_of(without, without.pairs[0])
    assert (own.tier, own.possible) == (NOT_DECIDED, (TIERS[-1], TIERS[0]))
    assert "add hellaswag to `evaluation.benchmarks`" in page(without, own)
    assert row(verdict(without), pair=PAIR)["retention"] == "undefined"


def test_a_target_that_is_never_right_leaves_everything_open(tmp_path):
    build(tmp_path)
    for name in FIVE:
        write_native(tmp_path, "big", name, accuracy_items(0))
    results = judged(Results.load(tmp_path, CONFIG, PAIRS))
    own = verdict_of(results, results.pairs[0])
    assert (own.tier, own.weakest) == (NOT_DECIDED, None)
    assert "undefined (an average needs every part" in page(results, own)
    assert "Retention on ARC-C, HellaSwag, WinoGrande, MMLU, GSM8K is undefined, and with it the mean" in page(
        results, own
    )


def test_one_benchmark_that_leaves_the_mean_undefined_is_named(tmp_path):
    build(tmp_path)
    write_native(tmp_path, "big", "gsm8k", accuracy_items(0))
    results = judged(Results.load(tmp_path, CONFIG, PAIRS))
    assert " Retention on GSM8K is undefined, and with it the mean: give more items there, or leave it out." in page(
        results, verdict_of(results, results.pairs[0])
    )


def test_without_a_retention_a_low_cosine_decides_and_the_page_says_so(tmp_path):
    build(tmp_path)
    for name in FIVE:
        write_native(tmp_path, "big", name, accuracy_items(0))
    results = judged(Results.load(tmp_path, CONFIG, PAIRS), cosine(0.5))
    own = verdict_of(results, results.pairs[0])
    assert own.tier == LOSES
    says = "Do not hand over with this recipe: the attention-output cosine is 0.500 [0.500, 0.500], and retention is undefined"
    assert says in page(results, own)


def test_a_pair_that_loses_nothing_has_no_weakest_benchmark(tmp_path):
    results = judged(answered(tmp_path, 100))
    own = verdict_of(results, results.pairs[0])
    assert own.weakest is None
    assert "weakest" not in page(results, own)


def test_the_row_of_a_pair_where_all_was_measured(tmp_path):
    build_swept(tmp_path)
    write_transfer(tmp_path, "ridge_k8", "gsm8k", accuracy_items(50))
    found = row(verdict(judged(load(tmp_path), cosine(0.8), latency())), pair=PAIR)
    assert (found["tier"], found["judged_by"]) == (NOT_DECIDED, "mean of five, cosine")
    assert found["retention"] == pytest.approx(100 * (4 * 75 + 50) / 5 / 90)
    assert found["source_retention"] == pytest.approx(100 * 60 / 90)
    assert (found["attention_cosine"], found["attention_cosine_n"]) == (pytest.approx(0.8), 8)
    assert (found["tokens"], found["warm"], found["cold"]) == (2048, pytest.approx(4.0), pytest.approx(1.6))
    assert (found["warm_from"], found["cold_from"], found["load_ms"]) == (512, 2048, 300.0)
    assert found["weakest"] == "GSM8K"
    assert (found["weakest_retention"], found["weakest_retention_n"]) == (pytest.approx(100 * 50 / 90), 100)
    assert (found["parameters"], found["best_recipe"]) == (24000, "head4")


def test_what_was_not_measured_is_a_word_and_no_number(tmp_path):
    results = judged(Results.load(build(tmp_path), CONFIG, PAIRS))
    frame = verdict(results)
    found = row(frame, pair=PAIR)
    for name in ("attention_cosine", "tokens", "warm", "cold", "warm_from", "cold_from", "load_ms", "best_recipe"):
        assert found[name] == NOT_MEASURED
    write_table(frame, tmp_path / "verdict")
    assert "nan" not in (tmp_path / "verdict.md").read_text().lower()


def test_a_page_says_what_to_add_for_what_was_not_measured(tmp_path):
    results = judged(Results.load(build(tmp_path), CONFIG, PAIRS))
    text = page(results, verdict_of(results, results.pairs[0]))
    for what in ("latency", "diagnostics", "the sweep `improved`"):
        assert f"not measured (add {what} for small-to-big to the config)" in text
    assert "retention alone decides" in text


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        (
            TIMES,
            "It pays from 512 tokens on if the source's cache is already there; from 2,048 tokens on if the source must "
            "prefill first (measured up to 2,048 tokens).",
        ),
        (
            TIMES | {2048: (40, 200, 160)},
            "on if the source's cache is already there; not at the longest length if the source must prefill first",
        ),
        (
            TIMES | {2048: (200, 60, 160)},
            "It saves no time at the longest length, even with the source's cache already there (measured up to 2,048 tokens).",
        ),
    ],
)
def test_the_page_says_from_where_it_pays(tmp_path, times, sentence):
    results = judged(answered(tmp_path, 99), latency(times))
    text = page(results, verdict_of(results, results.pairs[0]))
    assert sentence in text
    found = row(verdict(results), pair=PAIR)
    assert (found["cold_from"] == NEVER) == ("from 2,048 tokens on" not in sentence)


def test_loading_is_repaid_by_hand_offs_of_the_longest_length(tmp_path):
    results = judged(answered(tmp_path, 99), latency(load=300.0))
    text = page(results, verdict_of(results, results.pairs[0]))
    assert "Loading the mapper: 300.0 ms once a process, which 3 warm hand-offs of 2,048 tokens repay." in text
    slower = judged(answered(tmp_path, 99), latency(TIMES | {2048: (200, 60, 160)}))
    assert "300.0 ms once a process." in page(slower, verdict_of(slower, slower.pairs[0]))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (60, "The hand-off answers better than `small` alone: +15.0 points"),
        (95, "`small` alone answers better than the hand-off, which stands at -20.0 points"),
        (75, "These samples do not tell the hand-off from `small` alone (+0.0 points"),
    ],
)
def test_the_page_compares_with_the_source_alone(tmp_path, source, words):
    build(tmp_path)
    for name in FIVE:
        write_native(tmp_path, "small", name, accuracy_items(source))
    results = judged(Results.load(tmp_path, CONFIG, PAIRS))
    assert words in page(results, verdict_of(results, results.pairs[0]))


@pytest.mark.parametrize(
    ("correct", "words"),
    [
        (99, "Hand over: 99.0 %"),
        (88, "Hand over only where the loss is acceptable: 88.0 %"),
        (70, "Do not hand over with this recipe: 70.0 %"),
        (95, f"allow anything from *{PART}* to *{KEEPS}*"),
    ],
)
def test_the_page_says_what_to_do(tmp_path, correct, words):
    results = judged(answered(tmp_path, correct))
    text = page(results, verdict_of(results, results.pairs[0]))
    assert words in text
    assert f"The weakest benchmark is ARC-C, where {correct}.0 %" in text


def test_the_best_recipe_is_named_with_what_it_gains_on_the_other_chunks(tmp_path):
    results = judged(load(build_swept(tmp_path)))
    text = page(results, verdict_of(results, results.pairs[0]))
    # Chosen by .1 on the even chunks; .12 on the odd ones beside the headline's .2.
    assert "`head4` (sink rows weighted, native head 4), of 1.00× the parameters" in text
    assert "next-token KL -0.08 [-0.08, -0.08] nats a token beside `ridge_k8`" in text
    assert "These do not tell it" not in text


def test_a_recipe_that_gains_nothing_on_the_other_chunks_is_said_not_to(tmp_path):
    root = build_swept(tmp_path)
    write_measures(root, "head4", 2.5, [Item(f"chunk-{i}-ab", 0.2 if i % 2 else 0.1, 256.0) for i in range(24)])
    results = judged(load(root))
    text = page(results, verdict_of(results, results.pairs[0]))
    assert "next-token KL +0 [+0, +0] nats a token beside `ridge_k8`" in text
    assert "on chunks that did not choose it. These do not tell it from `ridge_k8`." in text


@pytest.mark.parametrize(
    ("nats", "told"),
    [(5.0, "less that of a random mapper, -4.8 [-4.8, -4.8]"), (0.2, "do not tell it from a random one")],
)
def test_a_mapper_is_held_against_a_random_one(tmp_path, nats, told):
    root = build_swept(tmp_path)
    results = load(root)
    own = results.transfers[PAIR, "ridge_k8", NEXT_TOKEN_KL]
    control = replace(own, system=RANDOM_MAPPER, items=[replace(item, score=nats) for item in own.items])
    results = judged(results)
    results = replace(results, transfers={**results.transfers, (PAIR, RANDOM_MAPPER, NEXT_TOKEN_KL): control})
    object.__setattr__(results, "held_out_benchmarks", [])
    text = page(results, verdict_of(results, results.pairs[0]))
    assert told in text
    assert ("Do not use this mapper" in text) == (nats == 0.2)


def test_pages_are_written_one_a_pair_and_again_the_same(tmp_path):
    results = judged(load(build_swept(tmp_path)), cosine(0.9), latency())
    write_pages(results, tmp_path / "verdicts")
    (written,) = (tmp_path / "verdicts").iterdir()
    assert written.name == f"{PAIR}.md"
    first = written.read_text()
    assert first.startswith(f"# {PAIR}: ")
    assert first.endswith("\n")
    assert "nan" not in first.lower()
    assert max(map(len, first.splitlines())) < 400
    write_pages(results, tmp_path / "verdicts")
    assert written.read_text() == first
