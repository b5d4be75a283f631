# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The patches of this package, one file ``patch_<module>.py`` each; ``vllm-ascend patches new``
creates one."""
