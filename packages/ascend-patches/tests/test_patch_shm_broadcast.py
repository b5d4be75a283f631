# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A reader of a MessageQueue of another machine: shutdown() leaves it waiting in vLLM, and ends it
with the patch."""

import pytest
from harness.engines import scripts

NAME = "shm_broadcast.dequeue"
SCRIPT = """
import os, sys, threading
from ascend_patches import enter
enter("engine")
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
subscribed = threading.Thread(target=writer.wait_until_ready)
subscribed.start()
reader.wait_until_ready()
subscribed.join()
writer.enqueue("sent")
print(reader.dequeue(timeout=60), flush=True)
try:
    reader.dequeue(timeout=0.1)
except TimeoutError:
    print("nothing", flush=True)
def wait():
    try:
        reader.dequeue()
    except RuntimeError as error:
        print(error, flush=True)
waiting = threading.Thread(target=wait)
waiting.start()
reader.shutdown()
waiting.join(float(sys.argv[1]))
if waiting.is_alive():
    print("waits", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("disabled", "patience", "last"), [("", "60", "cancelled"), (NAME, "3", "waits")]
)
def test_patched_shutdown_ends_a_reader_on_another_machine(disabled, patience, last, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    done = scripts.run(SCRIPT, patience)
    assert done.stdout.splitlines()[-3:] == ["sent", "nothing", last], done.stderr
