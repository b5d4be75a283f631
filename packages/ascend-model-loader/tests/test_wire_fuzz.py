# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fuzzing of the wire format from a seed; ``tools/check loading fuzz`` runs longer.

Runs in the background of the other tests (conftest.py), so it is the last file.
"""

from concurrent.futures import Future

from harness import npus


def test_fuzzing_refuses_malformed_frames_and_serves_valid_transfers(fuzzing: Future) -> None:
    done = fuzzing.result(200)
    assert done.returncode == 0, done.stderr[-3000:]
    (counts,) = npus.results(done.stdout)
    assert counts["to the server: behind the proof"] > 20
    assert counts["to the client: refused"] > 20
    assert counts["right transfers in between"] > 1
