# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Files of a CANN installation from which programs read its version."""

import os
from pathlib import Path


def write(target: Path, version: str) -> None:
    """Write the files into the directory of the libraries.

    Args:
        version: of CANN, such as ``9.1.0``.
    """
    # torch_npu expects these (torch_npu/_init/registry/registry_manager.py).
    for name in ("runtime", "compiler", "opp"):
        (target / name).mkdir(exist_ok=True)
        # a wheel has no empty directories
        (target / name / "version.info").write_text(f"Version={version}\n")
    (target / "ascend_emulator_install.info").write_text(f"version={version}\n")
    # Where verl (utils/device.py) and CANN's documentation look for the toolkit's version.
    toolkit = target / f"{os.uname().machine}-linux" / "ascend_toolkit_install.info"
    toolkit.parent.mkdir(exist_ok=True)
    toolkit.write_text(
        f"package_name=Ascend-cann-toolkit\nversion={version}\narch={os.uname().machine}\n"
        "os=linux\n"
    )
