"""Malformed frames, from a seed; `tools/check loading fuzz` runs longer. The last file: what it looks at has run
beside the others (conftest.py)."""

from concurrent.futures import Future

from harness import npus


def test_whole_fuzz_ends_with_bad_frames_refused_and_right_transfers_in_between(fuzzing: Future) -> None:
    done = fuzzing.result(200)
    assert done.returncode == 0, done.stderr[-3000:]
    (counts,) = npus.results(done.stdout)
    assert counts["to the server: behind the proof"] > 20
    assert counts["to the client: refused"] > 20
    assert counts["right transfers in between"] > 1
