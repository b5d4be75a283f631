# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Code that tests of several packages share.

- `engines/`: programs and ranks on NPUs, and what engines need in such a process.
- `programs/`: what tests and checks start as processes.
- `models/`: small models with random weights, and their inputs.
- `references/`: results to compare with, computed independently of an engine.
- `compare/`: comparisons of engines with references; `tools/check WHAT` runs `main()` of the module WHAT.
- `kv/`, `weights/`: instances, peers and faults of KV transfer and of model loading.
- `project/`: clones, prose and imports of the checkout, for tests of the repository.
"""
