# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Command ``ascend-emulator verify``: a report of what an NPU, or the emulator, computes and
refuses.

The parent process (``command``) starts processes (``child``) that run the cases of ``tables/``.
Only these import torch and torch_npu, of any version from 2.7 on.
"""
