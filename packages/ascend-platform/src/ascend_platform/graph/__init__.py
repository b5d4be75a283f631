# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""ACL graphs: capture and replay, capture sizes, fusion passes."""
