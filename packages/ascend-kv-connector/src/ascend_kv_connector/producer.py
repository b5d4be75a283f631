"""A producer's rank: keeps finished prompts' blocks, packs what readers fetch for, and knows when the blocks are free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ascend_kv_connector import protocol
from ascend_kv_connector.auth import CurveKeys
from ascend_kv_connector.buffers import SendBuffers, allocate_buffer, checksum
from ascend_kv_connector.config import Options
from ascend_kv_connector.errors import TransferError
from ascend_kv_connector.leases import Leases, NotReadyError
from ascend_kv_connector.paged_cache import Heads, PagedCache
from ascend_kv_connector.protocol import Ack, CacheInfo, Chunk, Fetch, Handshake, Query, Refused, Release, Reply
from ascend_kv_connector.rpc import RpcServer
from ascend_kv_connector.transport import Transport


class Producer:
    """One rank that others read from; ``leases`` is its bookkeeping, ``server`` where it answers.

    ``stream_context()`` is entered around all work on the device, in the answering thread; at its end that work is done.
    """

    def __init__(
        self,
        cache: PagedCache,
        transport: Transport,
        options: Options,
        engine: str,
        model: str,
        host: str,
        port: int = 0,
        stream_context: Callable[[], AbstractContextManager] = nullcontext,
        keys: CurveKeys | None = None,
    ) -> None:
        self.cache, self.transport, self.options, self.leases = cache, transport, options, Leases()
        self._stream_context = stream_context
        self._buffers = SendBuffers([allocate_buffer(transport, options.chunk_bytes, cache.device) for _ in range(options.slots)])
        self._cache_info = CacheInfo(
            version=protocol.VERSION,
            engine=engine,
            model=model,
            dtype=str(cache.dtype).removeprefix("torch."),
            transport=transport.name,
            session=transport.session,
            total_heads=cache.total_heads,
            first_head=cache.heads.first,
            heads=cache.heads.num,
            chunk_bytes=options.chunk_bytes,
            regions=cache.regions,
        )
        self.server = RpcServer(self.answer, host, port, keys)

    @property
    def buffers_in_use(self) -> int:
        """Buffers that readers have."""
        return self._buffers.in_use

    def answer(self, query: Query) -> Reply:
        """What this rank says to a query.

        Raises:
            TransferError: it will not be answered, and why.
        """
        match query:
            case Handshake(version=version, engine=engine):
                if version != protocol.VERSION:
                    found = f"protocol {protocol.VERSION} there and {version} here"
                    return Refused("mismatch", f"{found}; install the same ascend-kv-connector on both sides")
                if engine != self._cache_info.engine:
                    return Refused("peer", f"engine {self._cache_info.engine} is at this address and engine {engine} is not")
                return self._cache_info
            case Fetch():
                return self._fetch(query)
            case Release(request=request, reader=reader, readers=readers):
                self._buffers.release(request, reader)
                self.leases.release(request, reader, readers)
            case _:
                return Refused("mismatch", "this rank computes prompts for others and takes none")
        return Ack()

    def close(self) -> None:
        self.server.close()

    def _fetch(self, fetch: Fetch) -> Reply:
        self._buffers.release(fetch.request, fetch.reader, fetch.read)
        try:
            with self.leases.use(fetch.request) as lease:
                self._check(fetch, lease.tokens)
                ready = lease.ready_tokens({self.cache.regions[index].layer for index in fetch.regions})
                if ready <= fetch.start or (ready < fetch.stop and not fetch.allow_partial):
                    raise NotReadyError("its blocks are still being written")
                stop = min(fetch.stop, ready)
                seconds = 3 * self.options.answer_timeout
                loan = self._buffers.acquire(fetch.request, fetch.reader, seconds)
                if loan is None:
                    return Refused("deadline", f"all {len(self._buffers.buffers)} buffers there are in use", again=True)
                ticket, buffer = loan
                with self._stream_context():
                    slots = self.cache.slot_mapping(lease.blocks, fetch.start, stop, self.cache.region_groups[fetch.regions[0]])
                    size = self.cache.pack(slots, fetch.regions, Heads(fetch.first_head, fetch.heads), buffer)
        except NotReadyError as error:
            return Refused("lease", str(error), again=True)
        crc = checksum(buffer[:size]) if fetch.verify else None
        return Chunk(ticket, buffer.data_ptr(), size, stop, seconds, crc)

    def _check(self, fetch: Fetch, tokens: int) -> None:
        """Refuse what is not in the lease or in the cache, whoever asks."""
        if not 0 <= fetch.start < fetch.stop <= tokens:
            raise TransferError("mismatch", f"tokens {fetch.start} to {fetch.stop} of a prompt of {tokens} were asked for")
        if not fetch.regions or not all(0 <= index < len(self.cache.regions) for index in fetch.regions):
            raise TransferError("mismatch", f"regions {fetch.regions} of {len(self.cache.regions)} were asked for")
        if self.cache.is_hybrid and (
            fetch.allow_partial or len({self.cache.region_groups[index] for index in fetch.regions}) > 1
        ):
            raise TransferError(
                "mismatch",
                "its layers have several KV caches, which are read one by one, when the prompt is computed; give both instances "
                "--disable-hybrid-kv-cache-manager, or none of them (mode push needs it)",
            )
        wanted = Heads(fetch.first_head, fetch.heads)
        if fetch.heads < 1 or self.cache.heads.intersection(wanted) != wanted:
            raise TransferError("mismatch", f"heads {wanted} of {self.cache.heads} were asked for")
        size = (fetch.stop - fetch.start) * self.cache.token_bytes(fetch.regions, fetch.heads)
        if size > self.options.chunk_bytes:
            raise TransferError("mismatch", f"{size} bytes at once were asked for; a piece has {self.options.chunk_bytes}")
