# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Which addresses of a request's ``kv_transfer_params`` may be contacted: they come from whoever
may call vLLM's API."""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections.abc import Sequence
from dataclasses import replace

from ascend_transfer.auth import is_loopback
from ascend_transfer.errors import printable
from vllm.utils.network_utils import get_ip

from ascend_kv_connector.auth import read_secret
from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.params import TransferParams

VALID_SECONDS = 900
"""Age of a signature at which it is not accepted any more: longer than clocks differ and requests
take through a router."""


class TrustedAddresses:
    """Addresses that the configuration allows.

    Ranks of other instances: with a secret those that an instance with the same secret has signed,
    without one those on this machine. With ``peers`` (hosts and networks) they must be in it as
    well, and without a secret they may be anywhere in it. With ``insecure`` and neither, all are
    allowed, unless this instance is ``local``. Routers: ``metaservers``, by their exact URL.
    """

    def __init__(
        self,
        secret: bytes = b"",
        peers: Sequence[str] = (),
        metaservers: Sequence[str] = (),
        insecure: bool = False,
        local: bool = False,
    ) -> None:
        """``local``: the instance's host is a loopback address, which instances on other machines
        cannot have contacted."""
        self._secret, self.metaservers = secret, tuple(metaservers)
        self._insecure = insecure and not local
        self._hosts = {peer for peer in peers if parse_network(peer) is None}
        self._networks = [network for peer in peers if (network := parse_network(peer))]

    @classmethod
    def from_options(cls, options: Options) -> TrustedAddresses:
        local = is_loopback(options.host or get_ip())
        return cls(
            read_secret(options.secret_file),
            options.peer_hosts,
            options.metaservers,
            options.insecure,
            local,
        )

    def sign(self, params: TransferParams) -> TransferParams:
        """The parameters, with a signature if there is a secret."""
        if not self._secret:
            return params
        params = replace(params, remote_expires=int(time.time()) + VALID_SECONDS)
        return replace(params, remote_signature=self._signature(params))

    def refusal(self, params: TransferParams) -> str:
        """Why the parameters' router or ranks may not be contacted; "" if they may."""
        url = params.metaserver
        if url is None:
            return self.ranks_refusal(params)
        return (
            ""
            if url in self.metaservers
            else f"has metaserver {printable(url)}, which is not in option metaserver"
        )

    def ranks_refusal(self, params: TransferParams) -> str:
        """Why the parameters' ranks may not be contacted; "" if they may."""
        if self._secret and not hmac.compare_digest(
            str(params.remote_signature).encode(), self._signature(params).encode()
        ):
            return "has remote_ranks that no instance with this one's secret has sent"
        if self._secret and (params.remote_expires or 0) < time.time():
            return (
                f"has remote_ranks that were signed over {VALID_SECONDS} s ago, or the two"
                " machines' clocks differ"
            )
        for host, _ in params.remote_ranks or ():
            if not self.allows(host):
                option = (
                    "peers" if self._hosts or self._networks else "peers, and there is no secret"
                )
                return (
                    f"has remote_ranks with host {printable(host)}, which is not in option {option}"
                )
        return ""

    def allows(self, host: str) -> bool:
        """Whether a host of another instance may be contacted."""
        address = parse_network(host)
        if self._hosts or self._networks:
            return host in self._hosts or any(
                address is not None
                and address.version == network.version
                and address.subnet_of(network)  # type: ignore[arg-type]
                for network in self._networks
            )
        return bool(
            self._secret
            or self._insecure
            or host == "localhost"
            or (address and address.is_loopback)
        )

    def _signature(self, params: TransferParams) -> str:
        return hmac.digest(
            self._secret, b"ascend-kv-connector params " + params.signed(), "sha256"
        ).hex()


def parse_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """An address or network; None for a host name."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
