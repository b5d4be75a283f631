# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Import torch, transformers and vLLM, and freeze what they made: `import harness.engines.imports`
before all of them.

An engine's start calls gc.collect() some twenty times. With a million imported objects each call
takes a third of a second of CPU time, with frozen ones next to none. vLLM's V2 runner unfreezes
them when it has captured its graphs; launcher.run_ranks, and programs that make another engine,
freeze them again.
"""

import gc

gc.disable()  # This shortens the imports by a fifth.

import compressed_tensors  # noqa: E402, F401 - vLLM's quantization imports it in each engine
import torch  # noqa: E402, F401
import transformers  # noqa: E402, F401
from vllm import LLM  # noqa: E402, F401
from vllm.v1.worker import gpu_worker  # noqa: E402, F401

gc.enable()
gc.freeze()
