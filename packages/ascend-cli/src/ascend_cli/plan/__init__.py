# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The command ``vllm-ascend plan``: which parallel layouts a model can have on given NPUs, and an
estimate of what each does."""
