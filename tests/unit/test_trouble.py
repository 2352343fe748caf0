"""Errors of too little memory or disk are told in one sentence with a remedy; other errors are none of these."""

import errno

import pytest
import torch
from safetensors import SafetensorError

from kvferry.trouble import in_words

GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.00 GiB is free. "
    "Process 1 has 76.00 GiB memory in use.\nSee documentation"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError(GPU),
            ["out of GPU memory (CUDA out of memory)", "evaluation.batch_tokens", "compute.device"],
        ),
        (MemoryError(), ["out of main memory (MemoryError)", "evaluation.batch_tokens"]),
        (OSError(errno.ENOSPC, "No space left on device", "results/x"), ["the disk is full (results/x)", "free some"]),
        (SafetensorError("I/O error: No space left on device (os error 28)"), ["the disk is full; free some"]),
    ],
)
def test_too_little_is_said(error, words):
    sentence = in_words(error)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence


def test_main_memory_that_torch_does_not_get():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**16)
    assert in_words(caught.value).startswith("out of main memory (")


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), RuntimeError("another"), OSError(errno.EACCES, "no"), KeyError("k")]
)
def test_anything_else_is_not_told(error):
    assert in_words(error) is None
