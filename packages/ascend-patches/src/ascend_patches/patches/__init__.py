# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The patches of this package, one file ``patch_<module>.py`` each, and their rows,
``overrides.toml``; ``vllm-ascend patches new`` creates a file and its row. A function takes the
original and returns the replacement."""
