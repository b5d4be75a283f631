# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""What the tests of this repository and of its packages share: NPUs, ranks, small models, and
comparisons with references.

The modules features, graphs, kinds, launches, layouts, loading, quantized and transfers are also
run by `tools/check`.
"""
