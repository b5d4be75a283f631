"""A consumer's rank: threads that fetch requests' tokens from a producer's ranks and put them into the blocks that wait."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from time import monotonic

import torch
import zmq
from msgspec.structs import replace

from ascend_kv_connector import protocol
from ascend_kv_connector.buffers import allocate, checksum
from ascend_kv_connector.cache import PagedCache, Share, plan
from ascend_kv_connector.config import Options
from ascend_kv_connector.control import Caller, ControlServer
from ascend_kv_connector.errors import REST, TransferError
from ascend_kv_connector.keys import Keys
from ascend_kv_connector.protocol import Announce, Answer, Cache, Chunk, Dropped, Fetch, Hello, Noted, Question, Refused, Release
from ascend_kv_connector.transfers import Done, Failed, Source, Transfer
from ascend_kv_connector.transport import Transport

EAGER = 0.005
"""The longest pause, in seconds, before a prompt that is being computed is asked for anew."""

REMEMBERED = 4096
"""Announcements that came before the request they are for, and requests that ended before their announcement."""

WHOLE = -1
"""Among the places of what has landed: the transfer itself, where nothing counts before all is there."""

STUCK = 16
"""Threads that may wait for reads that do not return; with more of them no transfer is taken any more."""


class Consumer:
    """One rank, number ``rank`` of ``ranks`` of its instance.

    ``queue()`` is entered around all work on the device, in the fetching threads; at its end that work is done.
    """

    def __init__(
        self,
        cache: PagedCache,
        transport: Transport,
        options: Options,
        engine: str,
        model: str,
        rank: int = 0,
        ranks: int = 1,
        device_queue: Callable[[], AbstractContextManager] = nullcontext,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: Keys | None = None,
    ) -> None:
        self.cache, self.transport, self.options = cache, transport, options
        self.model, self.rank, self.ranks, self.reader = model, rank, ranks, f"{engine}/{rank}"
        self.device_queue, self.keys = device_queue, keys
        self.context = zmq.Context()
        self.waiting: queue.SimpleQueue[Transfer | Source | None] = queue.SimpleQueue()
        self._open: dict[str, Transfer] = {}
        self._resting: list[tuple[float, torch.Tensor]] = []
        self._lock = threading.Lock()
        self._lanes = [Lane(self) for _ in range(options.lanes)]
        self._stuck: list[Lane] = []
        self._announced: OrderedDict[str, Source] = OrderedDict()
        self._unannounced: OrderedDict[str, None] = OrderedDict()
        self.server = ControlServer(self.answer, host, port, keys)

    def start(self, request: str, source: Source | None, blocks: list[int], start: int, stop: int) -> None:
        """Fetch tokens ``start`` to ``stop`` into ``blocks``; :meth:`take` tells how it ends.

        Without a source it begins when a producer announces that it computes this prompt, and follows it layer by layer.
        """
        transfer = Transfer(request, source, blocks, start, stop, self.options.transfer_timeout)
        with self._lock:
            self._open[request] = transfer
            if source is None:
                transfer.source = self._announced.pop(request, None)
        if transfer.source is not None:
            self.waiting.put(transfer)

    def answer(self, question: Question) -> Answer:
        """What this rank says to a producer's question."""
        if isinstance(question, Dropped):
            self.lose(question.request, f"its prefill instance says: {question.cause}")
            return Noted()
        if not isinstance(question, Announce):
            return Refused("mismatch", "this rank takes prompts from others and computes none for them")
        source = Source(question.source_engine, question.source_request, tuple(map(tuple, question.ranks)))
        with self._lock:
            transfer = self._open.get(question.request)
            if question.request in self._unannounced:
                self.waiting.put(source)  # it is not wanted any more
            elif transfer is None:
                _remember(self._announced, question.request, source)
            elif transfer.source is None:
                transfer.source = source
                self.waiting.put(transfer)
        return Noted()

    def end(self, request: str, error: TransferError) -> None:
        """Give a transfer up, unless it has ended; :meth:`take` tells of it, and nothing is written any more."""
        if transfer := self._open.get(request):
            transfer.fail(error, self.transport.name, self.cache.block_size)

    def lose(self, request: str, cause: str) -> None:
        """Give a transfer up that no producer will take, unless one has."""
        if (transfer := self._open.get(request)) and transfer.source is None:
            self.end(request, TransferError("peer", cause, "see the router's log, and that of the prefill instance"))

    def decline(self, source: Source) -> None:
        """Tell the producer that this request's blocks are not wanted."""
        self.waiting.put(source)

    def take(self) -> list[Done | Failed]:
        """The transfers that have ended since the last call, each once. Ends those whose deadline has passed."""
        now = monotonic()
        self._stuck = [lane for lane in self._stuck if lane.thread.is_alive()]
        for transfer in list(self._open.values()):
            if transfer.deadline <= now and transfer.outcome is None:
                self._overdue(transfer)
        with self._lock:
            ended = {name: transfer.outcome for name, transfer in self._open.items() if transfer.outcome is not None}
            for name in ended:
                if self._open.pop(name).source is None:
                    _remember(self._unannounced, name, None)
        return list(ended.values())

    def close(self) -> None:
        self.server.close()
        for lane in self._lanes:
            lane.leave = True
            self.waiting.put(None)
        for lane in self._lanes:
            lane.thread.join(2)
        if not any(lane.thread.is_alive() for lane in [*self._lanes, *self._stuck]):
            self.context.destroy(linger=0)  # a thread that is still at work uses it

    def buffer(self) -> torch.Tensor:
        """A registered buffer: one that has rested, or a new one."""
        with self._lock:
            for place, (until, buffer) in enumerate(self._resting):
                if until <= monotonic():
                    del self._resting[place]
                    return buffer
        return allocate(self.transport, self.options.chunk_bytes, self.cache.device)

    def rest(self, buffer: torch.Tensor, seconds: float = REST) -> None:
        with self._lock:
            self._resting.append((monotonic() + seconds, buffer))

    def _overdue(self, transfer: Transfer) -> None:
        error = TransferError("deadline", f"its deadline of {transfer.seconds:g} s has passed")
        if transfer.source is None:
            error = TransferError("peer", f"no prefill instance has announced itself in {transfer.seconds:g} s")
        transfer.fail(error, self.transport.name, self.cache.block_size)
        if transfer.source is not None:
            self.decline(transfer.source)  # the thread that works on it may not come back to say so
        for place, lane in enumerate(self._lanes):
            if lane.at_work_on is transfer and len(self._stuck) < STUCK:
                lane.leave = True
                self._stuck.append(lane)
                self._lanes[place] = Lane(self)


class Lane:
    """A thread, its connections to producers' ranks, and two buffers: another thread unpacks one while the other is read into."""

    def __init__(self, consumer: Consumer) -> None:
        self._of = consumer
        self._buffers = deque(consumer.buffer() for _ in range(2))
        self._unpacker = ThreadPoolExecutor(1, "kv-unpack")
        self._unpacking: Future[None] | None = None
        self._callers: dict[tuple[str, int], Caller] = {}
        self._caches: dict[tuple[str, int], tuple[Cache, int]] = {}
        self.at_work_on: Transfer | None = None
        self.leave = False
        self.thread = threading.Thread(target=self._run, name="kv-lane", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.leave:
            work = self._of.waiting.get()
            if isinstance(work, Transfer):
                self.at_work_on = work
                self._serve(work)
                self.at_work_on = None
            elif work is not None:
                self._release(work)
        self._unpacker.shutdown(wait=False)
        for buffer in self._buffers:
            self._of.rest(buffer)
        for caller in self._callers.values():
            caller.close()

    def _serve(self, transfer: Transfer) -> None:
        assert transfer.source is not None
        transport, block_size = self._of.transport.name, self._of.cache.block_size
        try:
            self._fetch_all(transfer)
            transfer.succeed()
        except Exception as error:
            with suppress(Exception):  # what was read before it counts, and cannot fail it once more
                self._unpacked()
            if not isinstance(error, TransferError):  # after a ClosedError it has ended, and this changes nothing
                error = TransferError("internal", f"{type(error).__name__}: {error}")
            transfer.fail(error, transport, block_size)
        self._release(transfer.source)
        if isinstance(transfer.outcome, Failed) and transfer.outcome.kind != "aborted":
            self._forget(transfer.source)

    def _fetch_all(self, transfer: Transfer) -> None:
        assert transfer.source is not None
        peers = [self._cache_of(transfer, rank) for rank in range(len(transfer.source.ranks))]
        shares = plan(self._of.cache, peers, self._of.rank)
        cache = self._of.cache
        firsts = [cache.kept_from(transfer.start, transfer.stop, share.group) for share in shares]
        transfer.total = sum(
            (transfer.stop - first) * cache.token_bytes(share.local, share.heads.number)
            for first, share in zip(firsts, shares, strict=True)
        )
        if transfer.growing:
            self._follow(transfer, shares, peers)
            return
        transfer.landed = dict.fromkeys(range(len(shares)), transfer.start)
        if cache.windowed:  # it fails as a whole: vLLM takes no single blocks of several tables back
            transfer.landed[WHOLE] = transfer.start
        read: dict[int, list[int]] = {}
        for place, (first, share) in enumerate(zip(firsts, shares, strict=True)):
            if first < transfer.stop:
                read[share.rank] = self._fetch_share(transfer, place, first, share, peers[share.rank], read.get(share.rank, []))
        self._unpacked()

    def _fetch_share(self, transfer: Transfer, place: int, begin: int, share: Share, peer: Cache, read: list[int]) -> list[int]:
        """All tokens from ``begin`` on of one rank's share, the next piece asked for while one is read.

        ``read`` has the tickets of that rank that are read and not yet given back; so has what it returns.
        """
        assert transfer.source is not None
        caller = self._caller(transfer.source.ranks[share.rank])
        transfer.peer = caller.peer
        each = self._tokens_of_a_piece(share, peer)
        pieces = [self._piece(transfer, share, first, each) for first in range(begin, transfer.stop, each)]
        asked = monotonic()
        number = caller.send(replace(pieces[0], read=read))
        for index, piece in enumerate(pieces):
            transfer.remaining()
            # asked anew, it names what has been read meanwhile: readers that all keep one buffer would wait for each other
            chunk = _chunk(caller.settle(number, replace(piece, read=read), transfer.deadline))
            until = asked + chunk.seconds
            if index + 1 < len(pieces):
                asked = monotonic()
                number = caller.send(replace(pieces[index + 1], read=read))
            self._read(transfer, place, share, piece, chunk, peer.session, until)
            read = [chunk.ticket]
        return read

    def _follow(self, transfer: Transfer, shares: list[Share], peers: list[Cache]) -> None:
        """Fetch a prompt that is being computed: of one layer after another what is there of it, until all of it is."""
        consumer, source = self._of, transfer.source
        assert source is not None
        regions = consumer.cache.regions
        by_layer: dict[tuple[int, str], Share] = {}
        for share in shares:
            for remote, local in zip(share.remote, share.local, strict=True):
                part = by_layer.setdefault((share.rank, regions[local].layer), share._replace(remote=[], local=[]))
                part.remote.append(remote)
                part.local.append(local)
        parts = sorted(by_layer.values(), key=lambda share: share.local)
        transfer.landed = dict.fromkeys(range(len(parts)), transfer.start)
        at = [transfer.start] * len(parts)
        turns = deque(range(len(parts)))
        read: dict[int, list[int]] = {}

        def ask(turn: int) -> tuple[Fetch, Caller, int, float]:
            share = parts[turn]
            caller = self._caller(source.ranks[share.rank])
            each = self._tokens_of_a_piece(share, peers[share.rank])
            piece = self._piece(transfer, share, at[turn], each)
            return piece, caller, caller.send(replace(piece, read=read.get(share.rank, []))), monotonic()

        asked = ask(turns[0])
        while turns:
            left = transfer.remaining()
            turn = turns.popleft()
            share, (piece, caller, number, since) = parts[turn], asked
            transfer.peer = caller.peer
            again = replace(piece, read=read.pop(share.rank, []))
            chunk = _chunk(caller.settle(number, again, transfer.deadline, patience=left, longest_pause=EAGER))
            if not piece.start < chunk.stop <= piece.stop:
                raise TransferError("mismatch", f"tokens up to {chunk.stop} came for {piece.start} to {piece.stop}")
            if chunk.stop < transfer.stop:
                (turns.appendleft if chunk.stop == piece.stop else turns.append)(turn)  # a full piece: there may be more of it
            at[turn] = chunk.stop
            if turns:
                asked = ask(turns[0])
            got = replace(piece, stop=chunk.stop)
            self._read(transfer, turn, share, got, chunk, peers[share.rank].session, since + chunk.seconds)
            read.setdefault(share.rank, []).append(chunk.ticket)
        self._unpacked()

    def _tokens_of_a_piece(self, share: Share, peer: Cache) -> int:
        chunk_bytes = min(peer.chunk_bytes, self._of.options.chunk_bytes)
        each = chunk_bytes // self._of.cache.token_bytes(share.local, share.heads.number)
        if not each:
            raise TransferError("mismatch", "one token is larger than a piece", "raise chunk_mib on both instances")
        return each

    def _piece(self, transfer: Transfer, share: Share, first: int, each: int) -> Fetch:
        assert transfer.source is not None
        return Fetch(
            request=transfer.source.request,
            reader=self._of.reader,
            start=first,
            stop=min(first + each, transfer.stop),
            regions=share.remote,
            first_head=share.heads.first,
            heads=share.heads.number,
            verify=self._of.options.verify,
            growing=transfer.growing,
        )

    def _read(self, transfer: Transfer, place: int, share: Share, piece: Fetch, chunk: Chunk, session: str, until: float) -> None:
        """Read a piece, which is unpacked while the next one is read, and then counts as landed at this place."""
        consumer, cache = self._of, self._of.cache
        expected = (piece.stop - piece.start) * cache.token_bytes(share.local, piece.heads)
        if chunk.size != expected:
            raise TransferError("mismatch", f"a piece of {chunk.size} bytes came instead of {expected}")
        seconds = max(0.0, min(transfer.remaining(), until - monotonic()))
        while len(self._buffers) < 2:
            self._buffers.append(consumer.buffer())
        buffer = self._buffers.popleft()
        try:
            consumer.transport.read(session, chunk.address, buffer.data_ptr(), chunk.size, seconds)
        except Exception as error:
            if rest := getattr(error, "rest", REST):
                consumer.rest(buffer, rest)
            else:
                self._buffers.append(buffer)
            raise
        self._buffers.append(buffer)
        if monotonic() >= until:
            raise TransferError("lease", f"a piece took longer than the {chunk.seconds:g} s for which it was kept")
        self._unpacked()
        self._unpacking = self._unpacker.submit(self._unpack, transfer, place, share, piece, chunk, buffer[: chunk.size])

    def _unpack(self, transfer: Transfer, place: int, share: Share, piece: Fetch, chunk: Chunk, data: torch.Tensor) -> None:
        cache = self._of.cache
        if piece.verify and checksum(data) != chunk.checksum:
            raise TransferError("verify", f"{chunk.size} bytes came with another checksum than they were sent with")
        with transfer.landing(), self._of.device_queue():
            rows = cache.rows(transfer.blocks, piece.start - transfer.start, piece.stop - transfer.start, share.group)
            cache.unpack(rows, share.local, share.heads, data)
        transfer.size += chunk.size
        transfer.landed[place] = piece.stop

    def _unpacked(self) -> None:
        """Wait for the piece that is being unpacked, if there is one.

        Raises:
            TransferError: it was not what was sent.
            ClosedError: the transfer has ended.
        """
        unpacking, self._unpacking = self._unpacking, None
        if unpacking is not None:
            unpacking.result()

    def _cache_of(self, transfer: Transfer, rank: int) -> Cache:
        """What a rank of the producer holds, asked once for each connection."""
        assert transfer.source is not None
        transfer.remaining()
        place = transfer.source.ranks[rank]
        transfer.peer = f"{place[0]}:{place[1]}"
        caller = self._caller(place)
        known, connection = self._caches.get(place, (None, 0))
        if known is None or known.engine != transfer.source.engine or connection != caller.connection():
            answer = caller.ask(Hello(protocol.VERSION, transfer.source.engine), transfer.deadline)
            if not isinstance(answer, Cache):
                raise TransferError("mismatch", f"{type(answer).__name__} is no answer to Hello")
            if answer.model != self._of.model or answer.transport != self._of.transport.name:
                here = f"{self._of.model} by {self._of.transport.name}"
                raise TransferError("mismatch", f"it serves {answer.model} by {answer.transport}, this instance {here}")
            known = answer
            self._caches[place] = known, caller.connection()
        return known

    def _caller(self, place: tuple[str, int]) -> Caller:
        if place not in self._callers:
            try:
                self._callers[place] = Caller(self._of.context, *place, self._of.options.answer_timeout, self._of.keys)
            except zmq.ZMQError as error:
                raise TransferError("peer", f"{place[0]}:{place[1]} is no address ({error})") from None
        return self._callers[place]

    def _forget(self, source: Source) -> None:
        """Drop the connections to a producer and what is known of it: it may be another one by the next time."""
        for place in source.ranks:
            self._caches.pop(place, None)
            if caller := self._callers.pop(place, None):
                caller.close()

    def _release(self, source: Source) -> None:
        """Tell all ranks of the producer without a wait; one that does not hear it keeps the blocks until the lease ends."""
        for place in source.ranks:
            with suppress(TransferError):
                self._caller(place).send(Release(source.request, self._of.reader, self._of.ranks))


def _chunk(answer: Answer) -> Chunk:
    if not isinstance(answer, Chunk):
        raise TransferError("mismatch", f"{type(answer).__name__} is no answer to Fetch")
    return answer


def _remember(names: OrderedDict, name: str, what: object) -> None:
    names[name] = what
    while len(names) > REMEMBERED:
        names.popitem(last=False)
