# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Hints for failed transfers, by error code."""

from ascend_platform.transfer.errors import Kind, TransferError

HINTS: dict[Kind, str] = {
    "peer": "check that the instance is alive and its ports are reachable from here",
    "transport": "check the peer's log and the network between the two",
    "lease": (
        "raise lease on the prefill instance, or route the request to a less loaded decode instance"
    ),
    "deadline": "raise transfer_timeout, or find what is slow between the two instances",
    "verify": "data was corrupted in transit: check the network and the memory of both machines",
    "mismatch": "start both instances with the same model, dtype and connector",
    "aborted": "the client disconnected; nothing to do",
    "sleep": (
        "transfers end before an instance sleeps: route no requests to it, and wait until it has"
        " none"
    ),
    "internal": "this is a bug in ascend-kv-connector; please report it with this line",
}


OF_MACHINE = {
    "can't start new thread": "raise the limit of processes and threads (ulimit -u, pids.max)",
    "Too many open files": "raise the limit of open files (ulimit -n)",
    "out of memory": "lower --gpu-memory-utilization, or chunk_mib, slots and lanes",
    "Cannot allocate memory": "free memory of this machine, or lower chunk_mib, slots and lanes",
}
"""Hints for what the machine lacks, here or at the peer, by a part of the cause."""


def hint(error: TransferError) -> str:
    """The error's own hint, or that of its cause or its error code."""
    of_machine = (fix for cause, fix in OF_MACHINE.items() if cause in str(error))
    return error.hint or next(of_machine, HINTS[error.kind])
