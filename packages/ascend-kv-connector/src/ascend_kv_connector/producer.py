"""A producer's rank: keeps finished prompts' blocks, packs what readers ask for, and knows when the blocks are free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ascend_kv_connector import protocol
from ascend_kv_connector.buffers import Slots, allocate, checksum
from ascend_kv_connector.cache import Heads, PagedCache
from ascend_kv_connector.config import Options
from ascend_kv_connector.control import ControlServer
from ascend_kv_connector.errors import TransferError
from ascend_kv_connector.keys import Keys
from ascend_kv_connector.leases import Leases, NotYetError
from ascend_kv_connector.protocol import Answer, Cache, Chunk, Fetch, Hello, Noted, Question, Refused, Release
from ascend_kv_connector.transport import Transport


class Producer:
    """One rank that others read from; ``leases`` is its bookkeeping, ``server`` where it answers.

    ``queue()`` is entered around all work on the device, in the answering thread; at its end that work is done.
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
        queue: Callable[[], AbstractContextManager] = nullcontext,
        keys: Keys | None = None,
    ) -> None:
        self.cache, self.transport, self.options, self.leases = cache, transport, options, Leases()
        self._queue = queue
        self._slots = Slots([allocate(transport, options.chunk_bytes, cache.device) for _ in range(options.slots)])
        self._about = Cache(
            version=protocol.VERSION,
            engine=engine,
            model=model,
            dtype=str(cache.dtype).removeprefix("torch."),
            transport=transport.name,
            session=transport.session,
            total_heads=cache.total_heads,
            first_head=cache.heads.first,
            heads=cache.heads.number,
            chunk_bytes=options.chunk_bytes,
            regions=cache.regions,
        )
        self.server = ControlServer(self.answer, host, port, keys)

    @property
    def lent(self) -> int:
        """Buffers that readers have."""
        return self._slots.lent

    def answer(self, question: Question) -> Answer:
        """What this rank says to a question.

        Raises:
            TransferError: it will not be answered, and why.
        """
        match question:
            case Hello(version=version, engine=engine):
                if version != protocol.VERSION:
                    found = f"protocol {protocol.VERSION} there and {version} here"
                    return Refused("mismatch", f"{found}; install the same ascend-kv-connector on both sides")
                if engine != self._about.engine:
                    return Refused("peer", f"engine {self._about.engine} is at this address and engine {engine} is not")
                return self._about
            case Fetch():
                return self._fetch(question)
            case Release(request=request, reader=reader, readers=readers):
                self._slots.give_back(request, reader)
                self.leases.release(request, reader, readers)
            case _:
                return Refused("mismatch", "this rank computes prompts for others and takes none")
        return Noted()

    def close(self) -> None:
        self.server.close()

    def _fetch(self, ask: Fetch) -> Answer:
        self._slots.give_back(ask.request, ask.reader, ask.read)
        try:
            with self.leases.use(ask.request) as lease:
                self._check(ask, lease.tokens)
                there = lease.there({self.cache.regions[index].layer for index in ask.regions})
                if there <= ask.start or (there < ask.stop and not ask.growing):
                    raise NotYetError("its blocks are still being written")
                stop = min(ask.stop, there)
                seconds = 3 * self.options.answer_timeout
                loan = self._slots.take(ask.request, ask.reader, seconds)
                if loan is None:
                    return Refused("deadline", f"all {len(self._slots.buffers)} buffers there are in use", again=True)
                ticket, buffer = loan
                with self._queue():
                    rows = self.cache.rows(lease.blocks, ask.start, stop, self.cache.groups[ask.regions[0]])
                    size = self.cache.pack(rows, ask.regions, Heads(ask.first_head, ask.heads), buffer)
        except NotYetError as error:
            return Refused("lease", str(error), again=True)
        crc = checksum(buffer[:size]) if ask.verify else None
        return Chunk(ticket, buffer.data_ptr(), size, stop, seconds, crc)

    def _check(self, ask: Fetch, tokens: int) -> None:
        """Refuse what is not in the lease or in the cache, whoever asks."""
        if not 0 <= ask.start < ask.stop <= tokens:
            raise TransferError("mismatch", f"tokens {ask.start} to {ask.stop} of a prompt of {tokens} were asked for")
        if not ask.regions or not all(0 <= index < len(self.cache.regions) for index in ask.regions):
            raise TransferError("mismatch", f"regions {ask.regions} of {len(self.cache.regions)} were asked for")
        if self.cache.windowed and (ask.growing or len({self.cache.groups[index] for index in ask.regions}) > 1):
            raise TransferError(
                "mismatch",
                "its layers have several KV caches, which are read one by one, when the prompt is computed; give both instances "
                "--disable-hybrid-kv-cache-manager, or none of them (mode push needs it)",
            )
        wanted = Heads(ask.first_head, ask.heads)
        if ask.heads < 1 or self.cache.heads.common(wanted) != wanted:
            raise TransferError("mismatch", f"heads {wanted} of {self.cache.heads} were asked for")
        size = (ask.stop - ask.start) * self.cache.token_bytes(ask.regions, ask.heads)
        if size > self.options.chunk_bytes:
            raise TransferError("mismatch", f"{size} bytes at once were asked for; a piece has {self.options.chunk_bytes}")
