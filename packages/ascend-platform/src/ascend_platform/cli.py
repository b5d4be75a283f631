"""The command ``vllm-ascend``. Any installed wheel adds a subcommand by an entry point of group ``vllm_ascend.commands``.

The entry point's name is the subcommand's; it names a function that takes the subcommand's parser, adds its arguments and
sets ``run`` to a function from the parsed arguments to the exit status.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

GROUP = "vllm_ascend.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; the entry point of the console script."""
    parser = argparse.ArgumentParser(prog="vllm-ascend", description="vLLM on Ascend NPUs: what is here, and what is wrong.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            add = point.load()
            add(commands.add_parser(point.name, help=(add.__doc__ or "").partition("\n")[0], description=add.__doc__))
        except Exception as error:  # another wheel's command must not take this one along
            print(f"vllm-ascend: {point.name} ({point.value}) cannot be loaded: {error}", file=sys.stderr)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
