"""Connection of the package `h2`, over Python's `ssl` or `openssl s_client`, and its endpoint."""

import asyncio
import collections
import itertools
import random
import re
import socket
import ssl
import struct

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, ConnectionState, H2Connection, H2ConnectionStateMachine
from h2.events import (ConnectionTerminated, DataReceived, PingAckReceived, PingReceived,
                       RemoteSettingsChanged, ResponseReceived, SettingsAcknowledged, StreamEnded,
                       StreamReset, WindowUpdated)

SERVICE = "echo.app.svc.cluster.local:80"
FRAME_TYPE_RST_STREAM = 3
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
    # Letters in sequence by which a packet may grow, of random bytes.
    LETTERS_MAX = 64

    def __init__(self, stream, update_rate):
        self.stream, self.update_rate = stream, update_rate
        self.unsent = asyncio.Queue()
        self.sending = asyncio.create_task(self.send())
        self.sent = collections.Counter()

    def write(self, data):
        """Queues packets. None begins like a command."""
        while data:
            size = random.randint(1, self.PACKET_MAX - self.LETTERS_MAX)
            while size < len(data) and data[size] in self.LETTERS:
                size += 1
            check(size <= self.PACKET_MAX and data[0] not in self.LETTERS, True,
                  "a packet that is no command")
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
