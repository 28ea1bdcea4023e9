"""Strict HTTP/2 client of the package `h2` before a gateway, and the endpoint behind it.

Both sides of each tunnel are here, so that every byte is compared. Each violation of RFC 9113 that
`h2` finds fails the run. TLS is OpenSSL: Python's `ssl`, which cannot send KeyUpdate, or
`openssl s_client`, which can. The last line is the number of tunnels by the reason of their end.
"""

import argparse
import asyncio
import collections
import itertools
import json
import random
import re
import socket
import ssl
import struct
import sys
import time

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, ConnectionState, H2Connection, H2ConnectionStateMachine
from h2.errors import ErrorCodes
from h2.events import (ConnectionTerminated, DataReceived, PingAckReceived, PingReceived,
                       RemoteSettingsChanged, ResponseReceived, SettingsAcknowledged, StreamEnded,
                       StreamReset, WindowUpdated)
from h2.settings import SettingCodes as Setting

SCENARIO_SECONDS = 60
SERVICE = "echo.app.svc.cluster.local:80"
FRAME_TYPE_RST_STREAM = 3
WINDOW_MAX = LAST_STREAM = 2**31 - 1
# `h2` refuses every frame after GOAWAY. RFC 9113 section 6.8 lets streams up to its last one go on.
OPEN = ConnectionState.CLIENT_OPEN
H2ConnectionStateMachine._transitions[OPEN, ConnectionInputs.RECV_GOAWAY] = (None, OPEN)


class Failure(Exception):
    """A rule that the gateway broke."""


def check(got, expected, what):
    if got == expected:
        return
    if isinstance(expected, (bytes, bytearray)) and len(expected) > 64:
        pairs = itertools.zip_longest(got, expected)
        at = next(at for at, (one, other) in enumerate(pairs) if one != other)
        raise Failure(f"{what}: {len(got)} of {len(expected)} bytes, different at {at}")
    raise Failure(f"{what}: {got!r}, not {expected!r}")


class World:
    """Addresses, certificates, the endpoint's accepted sockets, and the expected ends."""

    def __init__(self, options):
        self.options = options
        self.accepted = asyncio.Queue()
        self.ends = collections.Counter()
        self.failure = asyncio.get_running_loop().create_future()

    async def start(self):
        host, port = self.options.endpoint.rsplit(":", 1)
        accept = lambda reader, writer: self.accepted.put_nowait((reader, writer))
        self.server = await asyncio.start_server(accept, host, int(port), backlog=1024)

    def fail(self, error):
        if not self.failure.done():
            self.failure.set_exception(error)

    async def connect(self, settings=None, over=None):
        """Opens a connection by Python's `ssl`, or over the given reader and writer."""
        if over is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # The identity is a URI, which is compared below.
            context.check_hostname = False
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations("root.crt")
            context.load_cert_chain("client.crt", "client.key")
            context.set_alpn_protocols(["h2"])
            host, port = self.options.gateway.rsplit(":", 1)
            over = await asyncio.open_connection(host, int(port), ssl=context)
            session = over[1].get_extra_info("ssl_object")
            check(session.selected_alpn_protocol(), "h2", "ALPN")
            names = session.getpeercert()["subjectAltName"]
            check(names, (("URI", self.options.identity),), "identity of the gateway")
        return await Peer(self, *over).start(settings or {})

    async def openssl(self, update_rate):
        """Opens a connection by `openssl s_client`, which updates keys at random points."""
        with open("client.crt") as file:
            certificates = re.findall("-----BEGIN.*?END CERTIFICATE-----\n", file.read(), re.S)
        with open("issuers.crt", "w") as file:
            file.writelines(certificates[1:])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # Not -quiet, which disables the commands. -brief prints to stderr only.
        process = await asyncio.create_subprocess_exec(
            "openssl", "s_client", "-connect", self.options.gateway, "-tls1_3", "-alpn", "h2",
            "-cert", "client.crt", "-key", "client.key", "-cert_chain", "issuers.crt",
            "-CAfile", "root.crt", "-verify", "5", "-verify_return_error",
            "-brief", "-msg", "-msgfile", "messages",
            stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=open("openssl.log", "wb"))
        theirs.close()
        commands = Commands(ours, update_rate)
        return commands, process, await self.connect(over=(process.stdout, commands))


class Commands:
    """Standard input of `openssl s_client`.

    s_client takes a read that begins with K or k as the command to send a KeyUpdate, with or
    without a request for the gateway's. A socket of packets keeps the reads apart.
    """

    LETTERS = b"KkQR"
    # s_client reads 8 KiB at once, and a packet is cut off behind that.
    PACKET_MAX = 8192

    def __init__(self, stream, update_rate):
        self.stream, self.update_rate = stream, update_rate
        self.unsent = asyncio.Queue()
        self.sending = asyncio.create_task(self.send())
        self.sent = collections.Counter()

    def write(self, data):
        """Queues packets. None begins like a command."""
        while data:
            size = random.randint(1, self.PACKET_MAX)
            while size < len(data) and data[size] in self.LETTERS:
                size -= 1
            check(size > 0 and data[0] not in self.LETTERS, True, "a packet that is no command")
            self.unsent.put_nowait(data[:size])
            data = data[size:]

    async def send(self):
        loop = asyncio.get_running_loop()
        while packet := await self.unsent.get():
            if random.random() < self.update_rate:
                command = random.choice("Kk")
                self.sent[command] += 1
                await loop.sock_sendall(self.stream, command.encode())
            await loop.sock_sendall(self.stream, packet)
        self.stream.close()

    async def drain(self):
        while self.unsent.qsize() > 10:
            await asyncio.sleep(0.001)

    def close(self):
        self.unsent.put_nowait(b"")


class Peer:
    """One connection. A task reads it, and every error of `h2` ends the run."""

    def __init__(self, world, reader, writer):
        self.world, self.reader, self.writer = world, reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.tunnels, self.own_resets = {}, set()
        self.pings, self.goaways = collections.deque(), []
        self.settings_sent = self.settings_acknowledged = 0
        self.may_end = self.has_ended = False
        self.at_goaway = lambda: None
        # False: the receiver of the bytes acknowledges them itself.
        self.acknowledges = True
        self.changed = asyncio.Event()

    async def start(self, settings):
        self.h2.initiate_connection()
        self.settings_sent += 1
        self.reading = asyncio.create_task(self.read())
        await self.settings(settings)
        return self

    async def read(self):
        try:
            received = bytearray()
            while data := await self.reader.read(1 << 16):
                received += data
                while len(received) >= 9:
                    length = 9 + int.from_bytes(received[:3], "big")
                    if len(received) < length:
                        break
                    frame = bytes(received[:length])
                    del received[:length]
                    # Frame by frame, so that each is handled before the next one is answered.
                    for event in self.h2.receive_data(frame):
                        self.handle(event)
                    # Without a wait for the gateway, which may wait until more is read.
                    self.push()
                self.wake()
            self.has_ended = True
            check(self.may_end, True, "expected end of the connection")
            self.wake()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.world.fail(error)

    def wake(self):
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, is_true, what):
        while not is_true():
            if self.has_ended:
                raise Failure(f"the connection ended before: {what}")
            await self.changed.wait()

    async def flush(self):
        self.push()
        await self.writer.drain()

    def push(self):
        """Sends the frames of `h2`, and fails if it answers a frame on a closed stream."""
        data, at = self.h2.data_to_send(), 0
        if data.startswith(b"PRI"):
            at = 24
        while at < len(data):
            length, kind, stream = int.from_bytes(data[at:at + 3], "big"), data[at + 3], \
                int.from_bytes(data[at + 5:at + 9], "big")
            if kind == FRAME_TYPE_RST_STREAM and stream not in self.own_resets:
                raise Failure(f"the gateway sent a frame on stream {stream}, which is closed")
            at += 9 + length
        self.writer.write(data)

    def handle(self, event):
        tunnel = self.tunnels.get(getattr(event, "stream_id", None))
        if isinstance(event, DataReceived):
            tunnel.received += event.data
            if self.acknowledges:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, ResponseReceived):
            check(tunnel.status, None, "earlier response")
            tunnel.status = dict(event.headers)[":status"]
        elif isinstance(event, StreamEnded):
            tunnel.has_ended = True
        elif isinstance(event, StreamReset):
            if event.remote_reset:
                tunnel.reset = event.error_code
        elif isinstance(event, PingAckReceived):
            check(event.ping_data, self.pings.popleft(), "payload of PING")
        elif isinstance(event, SettingsAcknowledged):
            self.settings_acknowledged += 1
        elif isinstance(event, ConnectionTerminated):
            self.goaways.append((event.error_code, event.last_stream_id))
            self.at_goaway()
        elif not isinstance(event, (WindowUpdated, RemoteSettingsChanged, PingReceived)):
            raise Failure(f"unexpected {event}")

    def request(self, authority=SERVICE, headers=(), end=False):
        """Sends a CONNECT."""
        stream = self.h2.get_next_available_stream_id()
        tunnel = self.tunnels[stream] = Tunnel(self, stream)
        fields = [(":method", "CONNECT"), (":authority", authority), *headers]
        self.h2.send_headers(stream, fields, end_stream=end)
        self.push()
        return tunnel

    async def tunnel(self, **arguments):
        """Opens a tunnel to the endpoint, and takes the endpoint's socket."""
        return await self.opened(self.request(**arguments))

    async def opened(self, tunnel):
        await self.until(lambda: tunnel.status or tunnel.reset is not None, "an answer")
        check((tunnel.status, tunnel.reset), ("200", None), "answer")
        tunnel.endpoint = Endpoint(*await self.world.accepted.get())
        return tunnel

    async def settings(self, values):
        """Changes SETTINGS, and waits until the gateway has acknowledged them."""
        self.h2.update_settings(values)
        self.settings_sent += 1
        number = self.settings_sent
        await self.flush()
        await self.until(lambda: self.settings_acknowledged >= number, "acknowledgement")

    async def ping(self):
        """Sends a PING, and waits for the answers to all."""
        self.pings.append(random.randbytes(8))
        self.h2.ping(self.pings[-1])
        await self.flush()
        await self.until(lambda: not self.pings, "an answer to PING")

    async def grant(self, tunnel, size):
        """Grows the window of a tunnel, and that of the connection as much."""
        self.h2.increment_flow_control_window(size)
        self.h2.increment_flow_control_window(size, tunnel.stream)
        await self.flush()

    async def close(self):
        """Checks that nothing is left to arrive, and closes."""
        await self.ping()
        check(self.settings_acknowledged, self.settings_sent, "acknowledged SETTINGS")
        check(self.goaways, [], "GOAWAY")
        self.may_end = True
        self.reading.cancel()
        self.writer.close()


class Tunnel:
    """One CONNECT stream."""

    def __init__(self, peer, stream):
        self.peer, self.stream = peer, stream
        self.received = bytearray()
        self.status = self.reset = self.endpoint = None
        self.has_ended = False

    async def send(self, data, frames=()):
        """Sends bytes in DATA of the given sizes and paddings, and then of any size."""
        h2, at = self.peer.h2, 0
        window = lambda: h2.local_flow_control_window(self.stream)
        rest = itertools.repeat((len(data), None))
        for size, padding in itertools.chain(frames, rest):
            if at == len(data):
                return
            extra = 0 if padding is None else 1 + padding
            size = min(size, len(data) - at, h2.max_outbound_frame_size - extra)
            least = min(size, 4096) + extra
            await self.peer.until(
                lambda: self.reset is not None or window() >= least, "a window")
            if self.reset is not None:
                raise Failure(f"stream {self.stream} was reset with {self.reset}")
            size = min(size, window() - extra)
            h2.send_data(self.stream, data[at:at + size], pad_length=padding)
            at += size
            await self.peer.flush()

    async def end(self):
        self.peer.h2.end_stream(self.stream)
        await self.peer.flush()

    async def cancel(self, code):
        self.peer.own_resets.add(self.stream)
        self.peer.h2.reset_stream(self.stream, code)
        await self.peer.flush()

    async def has_received(self, data):
        """Waits for this many bytes, and compares all."""
        what = f"{len(data)} bytes"
        await self.peer.until(
            lambda: len(self.received) >= len(data) or self.is_over(), what)
        check(self.received, data, "bytes downwards")

    def is_over(self):
        return self.has_ended or self.reset is not None

    async def ends(self, data):
        """Waits for the end, which has to be clean and behind exactly these bytes."""
        await self.peer.until(self.is_over, "an end")
        check(self.reset, None, "reset")
        check(self.received, data, "bytes downwards")

    async def is_reset(self, code):
        await self.peer.until(self.is_over, "a reset")
        check((self.reset, self.has_ended), (code, False), "end")


class Endpoint:
    """The endpoint's side of a tunnel."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, data, size=None):
        at = 0
        while at < len(data):
            count = size or random.randint(1, 100_000)
            self.writer.write(data[at:at + count])
            at += count
            await self.writer.drain()

    def end(self):
        self.writer.write_eof()

    async def receives(self, data):
        check(await self.reader.readexactly(len(data)), data, "bytes upwards")

    async def ends(self, data):
        check(await self.reader.read(), data, "bytes upwards")

    def reset(self):
        linger = struct.pack("ii", 1, 0)
        stream = self.writer.get_extra_info("socket")
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.close()

    async def is_reset(self):
        try:
            while await self.reader.read(1 << 16):
                pass
        except (ConnectionResetError, BrokenPipeError):
            return
        raise Failure("a clean end at the endpoint, not a reset")


async def exchange(tunnel, up, down, frames=(), endpoint_size=None):
    """Sends both streams at the same time, compares every byte, and ends both directions."""
    async def upwards():
        await tunnel.send(up, frames)
        await tunnel.end()

    async def downwards():
        await tunnel.endpoint.send(down, endpoint_size)
        tunnel.endpoint.end()

    await asyncio.gather(
        upwards(), downwards(), tunnel.endpoint.ends(up), tunnel.ends(down))
    tunnel.endpoint.writer.close()
    tunnel.peer.world.ends["completed"] += 1


def both(size):
    return random.randbytes(size), random.randbytes(size)


def settings(window=65535, frame=16384, table=4096):
    return {Setting.INITIAL_WINDOW_SIZE: window, Setting.MAX_FRAME_SIZE: frame,
            Setting.HEADER_TABLE_SIZE: table}


async def all_sizes_of_data(world):
    peer = await world.connect()
    largest = peer.h2.max_outbound_frame_size
    edges = [edge + near for edge in (512, 1024, 4096, 16384, 32768) for near in (-1, 0, 1)]
    for padding in (None, 0, 1, 255):
        room = largest - (0 if padding is None else 1 + padding)
        sizes = [*range(300), *edges, room - 1, room]
        frames = [(size, padding) for size in sizes]
        await exchange(await peer.tunnel(), *both(sum(sizes)), frames)
    await peer.close()


async def random_padding_and_one_byte_writes(world):
    peer = await world.connect()
    frames = [(random.randint(0, 3000), random.randint(0, 255)) for _ in range(300)]
    up = random.randbytes(sum(size for size, _ in frames))
    await exchange(await peer.tunnel(), up, random.randbytes(2000), frames, endpoint_size=1)
    await peer.close()


async def bulk_both_ways(world):
    for frame in (16384, 65536, 2**24 - 1):
        peer = await world.connect(settings(window=4 << 20, frame=frame))
        peer.h2.increment_flow_control_window(16 << 20)
        await exchange(await peer.tunnel(), *both(4 << 20))
        await peer.close()


async def small_windows(world):
    for window in (1, 2, 100, 5000):
        peer = await world.connect(settings(window=window))
        await exchange(await peer.tunnel(), random.randbytes(1000), random.randbytes(50 * window))
        await peer.close()


async def windows_that_only_the_test_opens(world):
    """Each window is used up to its last byte, and not one byte more."""
    peer = await world.connect(settings(window=0))
    peer.acknowledges = False
    tunnel = await peer.tunnel()
    down = random.randbytes(200_000)
    sending = asyncio.create_task(tunnel.endpoint.send(down))
    at = 0
    for size in (1, 2, 9, 100, 16383, 16384, 16385, 40_000):
        await peer.ping()
        await tunnel.has_received(down[:at])
        await peer.grant(tunnel, size)
        at += size
        await tunnel.has_received(down[:at])
    # SETTINGS that reduce a window below zero: bytes in flight are used up already.
    await peer.settings({Setting.INITIAL_WINDOW_SIZE: 30_000})
    await tunnel.has_received(down[:at + 30_000])
    await peer.settings({Setting.INITIAL_WINDOW_SIZE: 0})
    await peer.grant(tunnel, 30_000)
    await peer.ping()
    await tunnel.has_received(down[:at + 30_000])
    await peer.grant(tunnel, 7)
    await tunnel.has_received(down[:at + 30_007])
    await peer.grant(tunnel, len(down))
    await tunnel.has_received(down)
    await sending
    await finish(tunnel, down)
    await peer.close()


async def finish(tunnel, down):
    """Ends both directions of a tunnel whose bytes have arrived."""
    await tunnel.end()
    await tunnel.endpoint.ends(b"")
    tunnel.endpoint.end()
    await tunnel.ends(down)
    tunnel.peer.world.ends["completed"] += 1


async def settings_that_change_with_bytes_in_flight(world):
    peer = await world.connect(settings(window=100_000))
    streams = [exchange(await peer.tunnel(), *both(1 << 20)) for _ in range(3)]
    moving = asyncio.gather(*streams)
    changes = 0
    while not moving.done() or changes < 20:
        changes += 1
        await peer.settings(settings(
            window=random.choice([1000, 20_000, 65_535, 1 << 20]),
            frame=random.choice([16384, 20_000, 65_536]),
            table=random.choice([0, 100, 4096, 65_536])))
        small = await peer.tunnel(headers=[("baggage", f"k8s.cluster.name=west{changes}")])
        await exchange(small, *both(100))
    await moving
    await peer.settings(settings(window=WINDOW_MAX, frame=2**24 - 1))
    await exchange(await peer.tunnel(), *both(200_000))
    await peer.close()


async def pings_beside_bytes(world):
    peer = await world.connect()
    moving = asyncio.create_task(exchange(await peer.tunnel(), *both(1 << 20)))
    pings = 0
    while not moving.done() or pings < 50:
        await asyncio.gather(*(peer.ping() for _ in range(5)))
        pings += 5
    await moving
    await peer.close()


async def resets_of_either_side(world):
    peer = await world.connect(settings(window=1 << 20))
    beside = asyncio.create_task(exchange(await peer.tunnel(), *both(2 << 20)))
    for code, reason in [(ErrorCodes.CANCEL, "downstream_cancelled"),
                         (ErrorCodes.NO_ERROR, "downstream_cancelled"),
                         (ErrorCodes.INTERNAL_ERROR, "downstream_reset"),
                         (ErrorCodes.CONNECT_ERROR, "downstream_reset")]:
        tunnel = await peer.tunnel()
        await tunnel.send(b"up")
        await tunnel.endpoint.receives(b"up")
        # The endpoint keeps sending, so that bytes are in flight both ways.
        sending = asyncio.create_task(tunnel.endpoint.send(random.randbytes(4 << 20)))
        await peer.until(lambda: tunnel.received, "bytes")
        await tunnel.cancel(code)
        await tunnel.endpoint.is_reset()
        await asyncio.gather(sending, return_exceptions=True)
        world.ends[reason] += 1
    for size in (0, 1, 100_000):
        tunnel = await peer.tunnel()
        up = random.randbytes(size)
        await tunnel.send(up)
        await tunnel.endpoint.receives(up)
        tunnel.endpoint.reset()
        await tunnel.is_reset(ErrorCodes.CONNECT_ERROR)
        world.ends["upstream_reset"] += 1
    await beside
    await peer.close()


async def rejections(world):
    peer = await world.connect()
    for authority, status, reason in [("nothing.here:80", "503", "unknown_service"),
                                      ("secret.app.svc.cluster.local:80", "503", "not_exposed"),
                                      ("echo.app.svc.cluster.local:0", "400", "bad_authority")]:
        tunnel = peer.request(authority=authority)
        # The answer ends the stream, and RST_STREAM says that no body is read (section 8.1).
        await peer.until(lambda: tunnel.reset is not None, "an end")
        got = (tunnel.status, tunnel.has_ended, tunnel.reset, tunnel.received)
        check(got, (status, True, ErrorCodes.NO_ERROR, b""), authority)
        world.ends[reason] += 1
    await exchange(await peer.tunnel(), *both(1000))
    await peer.close()


async def trailers(world):
    """A tunnel carries no HEADERS (RFC 9113 section 8.5)."""
    peer = await world.connect()
    for fields in ([("a", "b")], [("long", "x" * 5000)]):
        tunnel = await peer.tunnel()
        await tunnel.send(b"up")
        await tunnel.endpoint.receives(b"up")
        peer.h2.send_headers(tunnel.stream, fields, end_stream=True)
        await peer.flush()
        await tunnel.is_reset(ErrorCodes.PROTOCOL_ERROR)
        await tunnel.endpoint.is_reset()
        world.ends["malformed"] += 1
    await exchange(await peer.tunnel(), *both(1000))
    await peer.close()


async def half_closed_tunnels(world):
    peer = await world.connect()
    up, down = both(300_000)
    for is_client_first in (True, False):
        tunnel = await peer.tunnel()
        if is_client_first:
            await asyncio.gather(tunnel.send(up), tunnel.endpoint.receives(up))
            await tunnel.end()
            await tunnel.endpoint.ends(b"")
            await asyncio.gather(tunnel.endpoint.send(down), tunnel.has_received(down))
            tunnel.endpoint.end()
            await tunnel.ends(down)
        else:
            await asyncio.gather(tunnel.endpoint.send(down), tunnel.has_received(down))
            tunnel.endpoint.end()
            await tunnel.ends(down)
            await asyncio.gather(tunnel.send(up), tunnel.endpoint.receives(up))
            await tunnel.end()
            await tunnel.endpoint.ends(b"")
        world.ends["completed"] += 1
    tunnel = await peer.tunnel(end=True)
    await tunnel.endpoint.ends(b"")
    await tunnel.endpoint.send(down)
    tunnel.endpoint.end()
    await tunnel.ends(down)
    world.ends["completed"] += 1
    await exchange(await peer.tunnel(), b"", b"")
    await peer.close()


async def as_many_streams_as_the_gateway_allows(world):
    peer = await world.connect()
    allowed = peer.h2.remote_settings.max_concurrent_streams
    streams = [exchange(await peer.tunnel(), *both(20_000)) for _ in range(allowed)]
    await asyncio.gather(*streams)
    check(peer.h2.open_outbound_streams, 0, "open streams")
    await exchange(await peer.tunnel(), *both(1000))
    await peer.close()


async def header_tables(world):
    """Indexed, evicted and Huffman-coded fields, and a smaller table of the encoder."""
    peer = await world.connect()
    for number in range(40):
        headers = [("baggage", f"k8s.cluster.name=west,number={number % 7}"),
                   ("traceparent", random.randbytes(30).hex()),
                   ("x-" + "n" * number, "v" * number * 10)]
        if number in (20, 30):
            peer.h2.encoder.header_table_size = 200 if number == 20 else 4096
        await exchange(await peer.tunnel(headers=headers), *both(50))
    await peer.close()


async def drain(world):
    """Two GOAWAYs; tunnels of before and between go on to their ends."""
    peer = await world.connect()
    up, down = both(300_000)
    late = []
    # This CONNECT precedes the answer to the PING that follows GOAWAY.
    peer.at_goaway = lambda: late or late.append(peer.request())
    tunnels = [await peer.tunnel() for _ in range(3)]
    for tunnel in tunnels:
        await asyncio.gather(tunnel.send(up), tunnel.endpoint.receives(up))
    await peer.until(lambda: peer.goaways, "the first GOAWAY")
    check(peer.goaways[0], (ErrorCodes.NO_ERROR, LAST_STREAM), "the first GOAWAY")
    tunnels.append(await peer.opened(late[0]))
    await asyncio.gather(tunnels[3].send(up), tunnels[3].endpoint.receives(up))
    await peer.until(lambda: len(peer.goaways) == 2, "the second GOAWAY")
    check(peer.goaways[1:], [(ErrorCodes.NO_ERROR, tunnels[3].stream)], "the second GOAWAY")
    peer.may_end = True
    await asyncio.gather(*(exchange(tunnel, up, down) for tunnel in tunnels))
    await peer.reading
    check(peer.has_ended, True, "end of the connection")


async def openssl_updates_keys(world):
    commands, process, peer = await world.openssl(update_rate=0.2)
    tunnels = [await peer.tunnel() for _ in range(3)]
    await asyncio.gather(*(exchange(tunnel, *both(2 << 20)) for tunnel in tunnels))
    for _ in range(30):
        await exchange(await peer.tunnel(), *both(random.randint(0, 200)))
    await peer.close()
    await process.wait()
    with open("messages") as file:
        text = file.read()
    sent, received = (len(re.findall(f"^{arrow} .*KeyUpdate", text, re.M))
                      for arrow in (">>>", "<<<"))
    # OpenSSL itself answers nothing here, as the gateway requests no update. One answer serves all
    # requests since the last one (RFC 8446 section 4.6.3).
    print(f"KeyUpdates: {dict(commands.sent)} sent, {received} received", file=sys.stderr)
    check(sent, commands.sent.total(), "KeyUpdates sent")
    check(20 < received <= commands.sent["K"], True, "answers to requests")
    check(commands.sent["k"] > 20, True, "KeyUpdates without a request")


SCENARIOS = {
    "h2": [all_sizes_of_data, random_padding_and_one_byte_writes, bulk_both_ways, small_windows,
           windows_that_only_the_test_opens, settings_that_change_with_bytes_in_flight,
           pings_beside_bytes, resets_of_either_side, rejections, trailers, half_closed_tunnels,
           as_many_streams_as_the_gateway_allows, header_tables],
    "drain": [drain],
    "openssl": [openssl_updates_keys],
}


async def main():
    parser = argparse.ArgumentParser()
    for name in ("gateway", "endpoint", "identity"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    parser.add_argument("scenarios", choices=SCENARIOS)
    options = parser.parse_args()
    random.seed(options.seed)
    print(f"seed {options.seed}", file=sys.stderr)
    world = World(options)
    await world.start()
    for scenario in SCENARIOS[options.scenarios]:
        begun = time.monotonic()
        running = asyncio.create_task(scenario(world))
        done, _ = await asyncio.wait({running, world.failure}, timeout=SCENARIO_SECONDS,
                                     return_when=asyncio.FIRST_COMPLETED)
        print(f"{scenario.__name__}: {time.monotonic() - begun:.2f} s", file=sys.stderr)
        if not done:
            raise Failure("not done in time")
        for ended in done:
            ended.result()
        check(world.accepted.qsize(), 0, "connections at the endpoint that no tunnel has")
    print(json.dumps(world.ends))


asyncio.run(main())
