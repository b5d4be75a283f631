# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fuzzing of the wire format from a seed; ``tools/check loading fuzz`` runs longer.

Runs in the background of the other tests (conftest.py), so it is the last file.
"""

from concurrent.futures import Future

from harness.engines import npus


def test_fuzzed_frames_are_refused_and_valid_transfers_served(fuzzing: Future) -> None:
    done = fuzzing.result(200)
    assert done.returncode == 0, done.stderr[-3000:]
    (counts,) = npus.results(done.stdout)
    assert counts["to the server: behind the proof"] > 20
    assert counts["to the client: refused"] > 20
    assert counts["right transfers in between"] > 1
