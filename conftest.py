# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""How `tools/test` shares all tests out to processes that run side by side; garbage collection
around all that is imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController


gc.disable()  # while the tests and what they test are imported: some million objects


def pytest_collection_finish() -> None:
    gc.freeze()  # a collection takes a third of a second otherwise
    gc.enable()


@pytest.fixture(autouse=True)
def plugins_of_this_process() -> Iterator[None]:
    """Plugins that vLLM loads in a test with a registry of components of its own are loaded again
    by the next test."""
    yield
    plugins, registry = (
        sys.modules.get(name) for name in ("vllm.plugins", "ascend_platform.components.registry")
    )
    if plugins and registry and registry._statuses.keys() <= {"ascend-platform"}:
        plugins.plugins_loaded = False


# All tests of these go to one process: of the emulator's, the last looks whether every entry point
# was run; of the model loader's, the last looks at a fuzzer that runs beside the others.
WHOLE = ("ascend-emulator", "ascend-model-loader")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """A file's tests go to one process, since they share engines. What takes long comes first: the
    emulator's, and the files that start engines. By default xdist begins with the files of most
    tests, and the longest, of one or two tests, are left for the end, when one process has nothing
    to do."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((package for package in WHOLE if f"/{package}/" in file), file)

        def _assign_work_unit(self, node: WorkerController) -> None:
            if not any(self.assigned_work.values()):  # the first: the queue is complete
                for file in [
                    file
                    for file in self.workqueue
                    if not file.startswith(("ascend-emulator", "tests/"))
                ]:
                    self.workqueue.move_to_end(file)
            super()._assign_work_unit(node)

    return ByFile(config, log)
