# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Signals during ``EngineCore.__init__``: only noted by vLLM, the end of the process with the
patch; afterwards as in vLLM."""

import signal

import pytest
from harness.engines import scripts

NAME = "core.end_while_starting"
# The executor of a real engine core, whose constructor sends the signal as a user would while
# weights are loaded.
SCRIPT = """
import os, signal, sys
from ascend_patches import enter
enter("engine")
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
noted = []
def run_engine_core():
    def signal_handler(number, frame):
        noted.append(number)
    signal.signal(signal.SIGINT, signal_handler)
    signal.signal(signal.SIGTERM, signal_handler)
    class Executor:
        def __init__(self, config):
            os.kill(os.getpid(), int(sys.argv[1]))
            raise RuntimeError("constructed")
    try:
        EngineCore(VllmConfig(), Executor, log_stats=False)
    except RuntimeError as error:
        print(error, noted == [int(sys.argv[1])])
run_engine_core()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("disabled", [False, True])
def test_signal_ends_an_engine_core_that_is_constructed(disabled, number, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", NAME if disabled else "")
    done = scripts.run(SCRIPT, str(int(number)))
    if disabled:
        assert "constructed True" in done.stdout, done.stderr
    else:
        assert (done.returncode, done.stdout.count("constructed")) == (128 + number, 0), done.stderr
