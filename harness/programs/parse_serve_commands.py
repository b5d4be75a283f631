# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_recipes.py: parse `vllm serve` commands as vLLM does, and run the configuration
checks of vLLM and the platform.

    python harness/programs/parse_serve_commands.py FILE

The file is a JSON list of {"name", "arguments", "config"}: the words after `vllm serve`, and the
contents of a config.json that stands for the model's, so that nothing is downloaded and no weights
are read. Prints one line `RESULT {json}` for each: what the checks made of it, or the error.
"""

import json
import sys
import tempfile
from pathlib import Path

from harness.engines import model_classes
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    command = ServeSubcommand()
    parser = FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    for each in json.loads(Path(sys.argv[1]).read_text()):
        model_classes.load(each["config"]["architectures"])
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(each["config"]))
            try:
                given = parser.parse_args(["serve", *each["arguments"]])
                command.validate(given)
                given.model, given.skip_tokenizer_init = directory, True
                config = AsyncEngineArgs.from_cli_args(given).create_engine_config()
                parallel = config.parallel_config
                record = {
                    "architecture": config.model_config.architecture,
                    "npus": parallel.world_size * parallel.data_parallel_size,
                    "worker": parallel.worker_cls,
                    "length": config.model_config.max_model_len,
                }
            except (Exception, SystemExit) as error:
                record = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT", json.dumps({"name": each["name"], **record}), flush=True)


if __name__ == "__main__":
    main()
