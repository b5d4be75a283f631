# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The logger of all wheels, below vLLM's logger "vllm", whose handler it inherits
(``vllm/logger.py``)."""

import logging

logger = logging.getLogger("vllm.ascend")
