# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KeyboardInterrupt in ``zmq_socket_ctx``: dropped by vLLM, raised with the patch."""

import pytest
from harness.engines import scripts

NAME = "network_utils.zmq_socket_ctx"
SCRIPT = """
import sys
from ascend_patches import enter
enter("platform")
import zmq
from vllm.v1.engine.utils import zmq_socket_ctx
try:
    with zmq_socket_ctx("inproc://here", zmq.ROUTER, bind=True):
        raise KeyboardInterrupt("terminated")
    print("dropped")
except KeyboardInterrupt as error:
    print("raised", error)
with zmq_socket_ctx("inproc://here", zmq.ROUTER, bind=True) as socket:
    print("bound" if socket.getsockopt(zmq.LAST_ENDPOINT) else "")
"""


@pytest.mark.parametrize(("disabled", "first"), [("", "raised terminated"), (NAME, "dropped")])
def test_keyboard_interrupt_is_raised_with_the_patch(disabled, first, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    done = scripts.run(SCRIPT)
    assert done.stdout.splitlines()[-2:] == [first, "bound"], done.stderr
