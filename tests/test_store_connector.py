"""An engine fills a pool of real Mooncake processes and is killed; another loads, also when the master is killed after that."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import npus
import pytest
from test_kv_connector import HERE, model

pytest.importorskip("mooncake.store", exc_type=ImportError, reason="Mooncake lacks a library: apt-get install libibverbs1")


@pytest.mark.slow
def test_a_pool_outlives_its_engine(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    case = {"model": model(tmp_path), "backend": "mooncake", "requests": 12, "harms": ["master killed"]}
    program = [sys.executable, str(HERE / "store_cases.py"), json.dumps(case)]
    tools = str(HERE.parent / "tools")
    done = npus.run(2, *program, memory="4GiB", VLLM_HOST_IP="127.0.0.1", VLLM_PLUGINS="", PYTHONPATH=tools)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = npus.results(done.stdout)
    print(result)
    assert result["filled"]["ended"] == {"length": 24}
    assert result["restart"]["not loaded"] == []
    assert result["restart"]["chunks"]["loaded (mooncake)"] > 10
    assert result["master killed"]["chunks"]["no answer (mooncake)"] > 0
    for phase in ("restart", "master killed"):
        record_property(f"seconds of {phase}", result[phase]["seconds"])
        assert result[phase]["ended"] == {"length": 12}
        assert result[phase]["different"] == []
        assert result[phase]["blocks are free"]
    assert result["master killed"]["seconds"] < 15
    assert result["left in /dev/shm"] == []
