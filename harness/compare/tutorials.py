# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The commands of every page whose output a test compares, also of those that the suite leaves out
(`tools/check tutorials`)."""

from harness import every_case


def main() -> None:
    """Run the test of tutorials with every page."""
    every_case.run("tests/e2e/test_tutorials.py")
