# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Settings of torch_npu's caching allocator in the environment."""

import os

from ascend_platform.logger import logger

VARIABLES = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def is_set() -> bool:
    """Whether the user has set the allocator."""
    return not os.environ.keys().isdisjoint(VARIABLES)


def expandable_by() -> str:
    """The variable that switches expandable segments on, or ""."""
    texts = {name: os.environ.get(name, "").replace(" ", "").lower() for name in VARIABLES}
    return next((name for name in texts if "expandable_segments:true" in texts[name]), "")


def warn_of_transfer() -> None:
    """Warn of a user's expandable segments with KV transfer, for which workers leave them off:
    transports register the memory of the KV cache, which is then one address range of several
    mappings."""
    if variable := expandable_by():
        logger.warning(
            "%s=expandable_segments:True with --kv-transfer-config: transports are not known to"
            " register such memory; fix: unset %s, which workers then leave off",
            variable,
            variable,
        )
