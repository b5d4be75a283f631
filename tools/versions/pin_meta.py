#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Write the exact versions of the component packages into vllm-ascend-all's dependencies.

tools/versions/pin_meta.py            rewrite packages/vllm-ascend-all/pyproject.toml
tools/versions/pin_meta.py --check    write nothing; exit 1 if the file is not up to date
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
META = PACKAGES / "vllm-ascend-all" / "pyproject.toml"


def pinned(text: str) -> str:
    """The text of the meta-package's pyproject.toml with every list of pins replaced by the current
    versions."""
    pins: dict[str, list[str]] = {"dependencies": [], "emulator": []}
    for path in sorted(PACKAGES.glob("ascend-*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        key = "emulator" if project["name"] == "ascend-emulator" else "dependencies"
        pins[key].append(f"{project['name']}=={project['version']}")
    for key, requirements in pins.items():
        lines = "".join(f'    "{requirement}",\n' for requirement in requirements)
        text, count = re.subn(
            rf"^{key} = \[[^\]]*\]$", f"{key} = [\n{lines}]", text, flags=re.MULTILINE
        )
        if count != 1:
            sys.exit(f"pin-meta: found {count} lists called {key!r} in {META}, expected 1")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the pins are not up to date"
    )
    check = parser.parse_args().check
    old = META.read_text()
    new = pinned(old)
    if check and new != old:
        print(
            "pin-meta: the pins in packages/vllm-ascend-all are out of date; run"
            " tools/versions/pin_meta.py",
            file=sys.stderr,
        )
        return 1
    if new != old:
        META.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
