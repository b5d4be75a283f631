# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Parts that several families need: rows in pages, the compressor, the indexer over compressed
keys, attention to selected rows with sinks, hyper-connections, and Kimi delta attention."""
