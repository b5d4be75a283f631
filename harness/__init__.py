# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Code that tests of several packages share: NPUs, ranks, small models, and comparisons with
references.

`tools/check WHAT` runs `main()` of the module WHAT. `programs/` has what tests and checks start as processes.
"""
