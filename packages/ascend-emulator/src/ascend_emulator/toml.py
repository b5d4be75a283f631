# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""tomllib, which Python has from 3.11 on; with 3.10 tomli, or the copy of it that pip contains.

`pip install --no-deps ascend-emulator` has no tomli beside it, and `ascend-emulator verify` is to
run all the same.
"""

import sys

if sys.version_info >= (3, 11):
    from tomllib import loads
else:
    try:
        from tomli import loads
    except ModuleNotFoundError:
        try:
            from pip._vendor.tomli import loads
        except ModuleNotFoundError:
            sys.exit(
                "ascend-emulator: Python 3.10 has no tomllib, and neither tomli nor pip, which"
                " contains it, is installed; fix: install tomli, or use Python 3.11 or later"
            )

__all__ = ["loads"]
