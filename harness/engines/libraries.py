# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Import the libraries that vLLM imports, and freeze what they made, but nothing of vLLM or of the
wheels: for scripts that test what happens while these are imported."""

import gc

gc.disable()  # This shortens the imports by a fifth.

import compressed_tensors  # noqa: E402, F401
import fastapi  # noqa: E402, F401
import openai  # noqa: E402, F401
import torch  # noqa: E402
import torch._inductor.standalone_compile  # noqa: E402
import torch.distributed.tensor  # noqa: E402, F401
from transformers import (  # noqa: E402, F401
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
)

gc.enable()
gc.freeze()
