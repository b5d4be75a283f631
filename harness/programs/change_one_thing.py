# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check transfers identity`: KV cache that was computed with something that has changed
since, in a pool, in host memory, and between a prefill and a decode instance.

    python harness/programs/change_one_thing.py '{"medium": "disk", "base": {…}, "others": {…}, …}'

Each instance is an engine in processes of its own. Prints a line `RESULT {json}`: by change, in the
running engine or with a restart, what was loaded (tokens; bytes between instances) and whether the answer is that of an
engine without a connector.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import kv_engine
import serve_kv_store
from serve_kv_store import Instance
from torch import nn

if __name__ == "__mp_main__":  # In an instance, and in its engine core.
    import harness.engines.imports  # noqa: F401

POOL = {"cpu_bytes_to_use": 100 << 20, "answer_timeout": 2, "transfer_timeout": 10}
PROMPT = [3 + number * number % 490 for number in range(300)]


def negate(model: nn.Module) -> None:
    """Other weights in place."""
    for name, each in model.named_parameters():
        if "layers" in name and each.dim() == 2:
            each.data.mul_(-1.0)


def load_in_place(llm: Any) -> bool:
    from vllm.lora.request import LoRARequest

    name, number, path = os.environ["ADAPTER"].split(",")
    adapter = LoRARequest(name, int(number), path, load_inplace=True)
    return bool(llm.llm_engine.add_lora(adapter))


def received(llm: Any) -> float:
    """Bytes of KV cache that this engine has read from prefill instances."""
    metrics = llm.get_metrics()
    return sum(each.value for each in metrics if each.name == "vllm:ascend_kv_transfer_bytes")


def instance(
    pipe: Any, devices: str, transfer: dict[str, Any] | None, given: dict[str, Any]
) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["ADAPTER"] = ",".join(map(str, given["adapter"]))
    answers: dict[str, Callable[[Any], Any]] = {
        "negate": lambda llm: llm.apply_model(negate) and None,
        "load": load_in_place,
        "chunks": serve_kv_store.chunks,
        "received": received,
    }
    options = {"disable_log_stats": False, "max_num_seqs": 4, "enforce_eager": True}
    options["enable_prefix_caching"] = transfer is not None
    kv_engine.serve(pipe, given["model"], devices, transfer, options | given["engine"], answers)


class Changed(Instance):
    """An engine of one configuration."""

    def __init__(
        self, given: dict[str, Any], devices: str, transfer: dict[str, Any] | None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=instance, args=(theirs, devices, transfer, given))
        self.process.start()
        theirs.close()
        self.asked = 0

    def answer(self, first: int, **more: Any) -> tuple[Any, ...]:
        """Tokens, reason and loaded tokens of the prompt that begins with this token."""
        self.asked += 1
        item = {"name": f"r{self.asked}", "prompt": [first, *PROMPT], "length": 6} | more
        (reply,) = self.ask([item]).values()
        return tuple(reply)


class Check:
    """One medium; ``case`` has the configurations."""

    def __init__(self, case: dict[str, Any], disk: str) -> None:
        self.case, self.base, self.medium = case, case["base"], case["medium"]
        self.adapter = {"adapter": self.base["adapter"]}
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.changed: list[Changed] = []
        self.right: dict[str, Any] = case.get("right", {})
        backend = {"backend": self.medium, "disk_path": disk}
        self.transfer: Any = {
            "kv_connector": "AscendStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": POOL | backend,
        }
        if self.medium == "host":
            host = {"cpu_bytes_to_use": POOL["cpu_bytes_to_use"]}
            self.transfer |= {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": host,
            }

    def start(self, given: dict[str, Any], transfer: Any, devices: str = "") -> Changed:
        visible = devices or ("0,1" if "tensor_parallel_size" in given["engine"] else "0")
        if given["model"] == self.base["model"]:
            shutil.copy(given["weights"], given["model"])
        self.changed.append(Changed(given, visible, transfer))
        self.changed[-1].ready()
        shutil.copy(self.base["weights"], self.base["model"])
        return self.changed[-1]

    def fetch(self, decode: Changed, first: int, **more: Any) -> tuple[Any, ...]:
        """The answer of a decode instance, with the bytes that it read instead of the cached
        tokens: vLLM replaces these by the prefix hits of the prefill instance."""
        before = decode.ask("received")
        tokens, reason, params, *_ = decode.answer(first, **more)
        return tokens, reason, params, decode.ask("received") - before

    def note(self, change: str, when: str, answer: tuple[Any, ...], right: str) -> None:
        tokens, reason, _, loaded, *_ = answer
        is_right = reason == "length" and tokens == self.right[right]
        self.outcomes.setdefault(change, {})[when] = {
            "loaded": loaded,
            "outcome": "right" if is_right else "refused" if reason == "error" else "WRONG",
        }

    def references(self) -> dict[str, Any]:
        """Tokens of engines without a connector, by what they are computed with. vLLM's own prefix
        cache would keep those of earlier weights and adapters."""
        right = {}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        one = self.start(self.base, None)
        right["base"], right["base 9"] = one.answer(5)[0], one.answer(9)[0]
        right["adapter"] = one.answer(5, **self.adapter)[0]
        self.train_adapter(2)
        one.ask("load")
        right["adapter's contents"] = one.answer(5, **self.adapter)[0]
        right["contents 9"] = one.answer(9, **self.adapter)[0]
        self.train_adapter(1)
        one.ask("negate")
        right["weights in place"], right["weights 9"] = one.answer(5)[0], one.answer(9)[0]
        one.close()
        for name, given in self.case["others"].items():
            other = self.start(given, None)
            right[name] = other.answer(5)[0]
            other.close()
        return right

    def train_adapter(self, contents: int) -> None:
        path = self.base["adapter"][2]
        for name in os.listdir(f"{path}-{contents}"):
            with open(f"{path}-{contents}/{name}", "rb") as file:
                content = file.read()
            with open(f"{path}/{name}", "wb") as file:
                file.write(content)

    def pool(self) -> None:
        """Pools, and host memory."""
        running = self.start(self.base, self.transfer)
        for more in ({}, self.adapter, {"salt": "a"}):
            running.answer(5, **more)
            running.stored(1.0)
            assert running.free()
        self.note("nothing", "running", running.answer(5), "base")
        self.note("adapter's name", "running", running.answer(5, adapter=self.renamed()), "adapter")
        self.note("salt", "running", running.answer(5, salt="b"), "base")
        if self.medium != "host":  # For the engine that starts with the second contents.
            running.answer(9, **self.adapter)
            running.stored(1.0)
        self.train_adapter(2)
        running.ask("load")
        assert running.free()
        answer = running.answer(5, **self.adapter)
        self.note("adapter's contents", "running", answer, "adapter's contents")
        if self.medium == "host":
            self.train_adapter(1)
            running.ask("negate")
            assert running.free()
            self.note("weights in place", "running", running.answer(5), "weights in place")
            running.close()
            return
        other = self.start(self.base, self.transfer)  # Its adapter is the second one.
        self.note("nothing", "restart", other.answer(5), "base")
        # Of the other prompt the pool has no KV cache of the second contents.
        answer = other.answer(9, **self.adapter)
        self.note("adapter's contents", "restart", answer, "contents 9")
        self.train_adapter(1)
        other.close()
        running.ask("negate")
        assert running.free()
        self.note("weights in place", "running", running.answer(5), "weights in place")
        running.answer(9)
        running.stored(1.0)
        other = self.start(self.base, self.transfer)
        answer = other.answer(9)  # Which only the other weights have computed.
        self.note("weights in place", "restart", answer, "base 9")
        renamed = other.answer(5, adapter=self.renamed("third"))
        self.note("adapter's name", "restart", renamed, "adapter")
        self.note("salt", "restart", other.answer(5, salt="c"), "base")
        other.close()
        running.close()
        for name, given in self.case["others"].items():
            if before := given.get("beside"):  # An engine that differs in this one thing.
                other = self.start(self.case["others"][before], self.transfer)
                other.answer(5)
                other.stored(1.0)
                other.close()
            other = self.start(given, self.transfer)
            self.note(name, "restart", other.answer(5), name)
            other.close()

    def pair(self) -> None:
        """A prefill and a decode instance."""

        def role(name: str) -> dict[str, Any]:
            return {
                "kv_connector": "AscendP2PConnector",
                "kv_role": name,
                "engine_id": "0",
                "kv_connector_extra_config": kv_engine.OPTIONS | {"host": "127.0.0.1"},
            }

        def params(one: Changed, first: int = 5, **more: Any) -> dict[str, Any]:
            return {"params": one.answer(first, length=1, params=DECODE, **more)[2]}

        one = self.start(self.base, role("kv_producer"))
        decode = self.start(self.base, role("kv_consumer"), "1")
        self.note("nothing", "running", self.fetch(decode, 5, **params(one)), "base")
        given = params(one, **self.adapter)
        answer = self.fetch(decode, 5, adapter=self.renamed(), **given)
        self.note("adapter's name", "running", answer, "adapter")
        given = params(one, salt="a")
        self.note("salt", "running", self.fetch(decode, 5, salt="b", **given), "base")
        given = params(one, **self.adapter)
        self.train_adapter(2)
        decode.ask("load")
        answer = self.fetch(decode, 5, **self.adapter, **given)
        self.note("adapter's contents", "running", answer, "adapter's contents")
        given = params(one)
        decode.ask("negate")
        self.note("weights in place", "running", self.fetch(decode, 5, **given), "weights in place")
        decode.close()
        given = params(one, **self.adapter)  # Of the first contents, as far as loaded.
        decode = self.start(self.base, role("kv_consumer"), "1")
        answer = self.fetch(decode, 5, **self.adapter, **given)
        self.note("adapter's contents", "restart", answer, "adapter's contents")
        self.train_adapter(1)
        decode.close()
        for name, other in self.case["others"].items():
            first = self.case["others"][other["beside"]] if "beside" in other else None
            prefill = self.start(first, role("kv_producer"), "0") if first else one
            devices = "1,2" if "tensor_parallel_size" in other["engine"] else "1"
            decode = self.start(other, role("kv_consumer"), devices)
            self.note(name, "restart", self.fetch(decode, 5, **params(prefill)), name)
            decode.close()
            if first:
                prefill.close()
        decode = self.start(self.base, role("kv_consumer"), "1")
        self.note("nothing", "restart", self.fetch(decode, 5, **params(one)), "base")
        given = params(one, **self.adapter)
        answer = self.fetch(decode, 5, adapter=self.renamed(), **given)
        self.note("adapter's name", "restart", answer, "adapter")
        self.note(
            "salt", "restart", self.fetch(decode, 5, salt="b", **params(one, salt="a")), "base"
        )
        one.ask("negate")
        self.note("weights in place", "restart", self.fetch(decode, 9, **params(one, 9)), "base 9")
        decode.close()
        one.close()

    def close(self) -> None:
        for each in self.changed:
            each.close()

    def renamed(self, name: str = "other") -> tuple[Any, ...]:
        _, number, path = self.base["adapter"]
        return name, number + 1, path


DECODE = {"do_remote_decode": True}


def main(case: dict[str, Any]) -> None:
    from harness.kv import mooncake_pool

    with contextlib.ExitStack() as stack:
        check = Check(case, stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(check.close)
        if case["medium"] == "mooncake":
            pool = stack.enter_context(mooncake_pool.mooncake_pool(512))
            os.environ["MOONCAKE_CONFIG_PATH"] = str(pool.config)
        if case["medium"] == "alone":
            result: dict[str, Any] = check.references()
        else:
            (check.pair if case["medium"] == "pair" else check.pool)()
            result = check.outcomes
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
