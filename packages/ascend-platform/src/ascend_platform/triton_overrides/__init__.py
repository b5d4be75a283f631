"""PyTorch implementations of vLLM's Triton kernels, and their registration."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from vllm.triton_utils import dispatcher


def register(overrides: Mapping[str, Callable[..., Any]]) -> None:
    """Let vLLM launch these functions instead of its kernels, as far as they have not been replaced before."""
    with warnings.catch_warnings():  # vLLM looks at every name of every module, deprecated ones too
        warnings.simplefilter("ignore")
        dispatcher.register_kernels({name: kernel for name, kernel in overrides.items() if name not in dispatcher._registry})
