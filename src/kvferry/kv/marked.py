"""Tensors on disk that say what decided them, so that a job that was killed knows which of its files it need not make again.

A file's mark is a fingerprint of all that decides its contents; beside it stands a checksum of these, since a file that was
damaged still says what it was made of. Does not know what the tensors are.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvferry.files import written_whole

# The one entry of a file's metadata: safetensors writes several in any order, and equal files would differ in their bytes.
ENTRY = "kvferry"


def write_marked(path: Path, tensors: dict[str, Tensor], mark: str, **more: Any) -> None:
    """Write a safetensors file, whole or not at all, with its mark, its checksum and what `more` says as its metadata."""
    said = {"mark": mark, "sha256": _checksum(tensors), **more}
    with written_whole(path) as temporary:
        save_file(tensors, temporary, metadata={ENTRY: json.dumps(said, sort_keys=True)})


def is_marked(path: Path, mark: str) -> bool:
    """Whether an earlier run left this very file, whole, with this mark and as it was written."""
    if not path.exists():
        return False
    try:
        with safe_open(path, "pt") as file:
            said = json.loads((file.metadata() or {}).get(ENTRY, "{}"))
            if said.get("mark") != mark:
                return False
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file of safetensors is no dict
            return said["sha256"] == _checksum(tensors)
    except (SafetensorError, ValueError):
        return False


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Hex sha256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
