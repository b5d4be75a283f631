# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The secret of instances that transfer KV cache."""

from __future__ import annotations

from ascend_platform import extension
from ascend_transfer import secret
from ascend_transfer.auth import is_loopback

SECRET_ENV = "VLLM_ASCEND_KV_SECRET"


def read_secret(secret_file: str) -> bytes:
    """The secret from the file, otherwise from the environment variable; empty if neither is set.
    Raises RefusedError."""
    return secret.read_secret(secret_file, SECRET_ENV, "kv_connector_extra_config.secret_file")


def require_secret(shared: bytes, insecure: bool, host: str, transport: str) -> None:
    """Check that an instance that others can reach has a secret.

    Mooncake listens on all addresses of the machine, whatever ``host`` is, also with
    ``MC_TCP_BIND_ADDRESS`` (0.3.13).

    Raises:
        RefusedError: it has no secret, and is not to be insecure.
    """
    if shared or insecure or (transport != "mooncake" and is_loopback(host)):
        return
    open_port = transport == "mooncake"
    reached = (
        "Mooncake listens on all addresses of this machine"
        if open_port
        else f"other machines can reach {host}"
    )
    raise extension.RefusedError(
        f"AscendP2PConnector: {reached}, and anyone who connects could fetch KV cache; fix: set"
        f" secret_file in kv_connector_extra_config or {SECRET_ENV} on all instances (with Ray,"
        ' before ray start), or "insecure": true where no other machine can connect'
    )


def warn_of_open_ports(insecure: bool, transport: str, session: str) -> None:
    """Say that the secret does not protect Mooncake's ports, unless the user has accepted it."""
    if transport == "mooncake" and not insecure:
        extension.logger.warning(
            "AscendP2PConnector: Mooncake does not authenticate its peers: any machine that reaches"
            " its ports (of %s, and one more) can read and write KV cache, with the secret too; fix:"
            ' admit the other instances only in the firewall (option ports); "insecure": true silences this line',
            session,
        )
