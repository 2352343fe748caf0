"""What the tests of `check` and `new` share: folders of tiny models, those that transfer and those that do not."""

import shutil
from pathlib import Path

from transformers import AutoConfig

ROOT = Path(__file__).parents[2]


def checkout(root):
    """A checkout as far as a command reads one: registries, two configs and the schemas."""
    (root / "config").mkdir()
    for name in ("config", "ci", "wheels", "models", "corpora", "pairs"):
        shutil.copy(ROOT / f"config/{name}.yaml", root / "config")
    shutil.copytree(ROOT / "workflow/schemas", root / "workflow/schemas")
    return root


def edited(folder, destination, **changes):
    """A copy of a model's folder without weights, with changes in its config."""
    shutil.copytree(folder, destination, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(destination)
    for key, value in changes.items():
        setattr(config, key, value)
    config.save_pretrained(destination)
    return destination
