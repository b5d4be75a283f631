"""Malformed and oversized frames, from a seed; tools/loading fuzz goes on for as long as it is told."""

import pytest
import weight_fuzz


@pytest.mark.parametrize("seed", [1])
def test_bad_frames_are_refused_and_the_server_goes_on(seed: int) -> None:
    counts = weight_fuzz.fuzz(6, seed)
    assert counts["to the server: behind the proof"] > 20
    assert counts["to the client: refused"] > 20
