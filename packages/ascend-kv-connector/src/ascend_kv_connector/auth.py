"""The secret of instances that transfer KV cache."""

from __future__ import annotations

from ascend_platform import extension
from ascend_platform.transfer import secret
from ascend_platform.transfer.auth import is_loopback

SECRET_ENV = "VLLM_ASCEND_KV_SECRET"


def read_secret(secret_file: str) -> bytes:
    """The secret from the file, otherwise from the environment variable; empty if neither is set. Raises RefusedError."""
    return secret.read_secret(secret_file, SECRET_ENV, "kv_connector_extra_config.secret_file")


def require_secret(shared: bytes, insecure: bool, host: str) -> None:
    """Check that an instance that other machines can reach has a secret.

    Raises:
        RefusedError: it has none, and is not to be insecure.
    """
    if not shared and not insecure and not is_loopback(host):
        raise extension.RefusedError(
            f"AscendP2PConnector: other machines can reach {host}, and anyone there could fetch KV cache; set secret_file in "
            f'kv_connector_extra_config or {SECRET_ENV} on all instances, or "insecure": true'
        )
