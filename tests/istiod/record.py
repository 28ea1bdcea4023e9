"""Records the gRPC messages between Strait and a real istiod, as a proxy on loopback.

    .h2/bin/python tests/istiod/record.py --listen 127.0.0.1:15012 --certificate C.crt --key C.key \\
        --istiod 10.0.0.1:15012 --root R.crt --about 'istiod: 1.30.0' tests/corpus/istiod/NAME.txt

Strait takes the proxy for istiod, so its certificate has istiod's name and a root that Strait
trusts. Each line of standard input becomes a mark in the recording; its end ends the recording.

Headers are not recorded, except for the method, so that no token is. Of clusters, the name alone is
kept. A message that looks as if it had a secret, also one in hex or base64, ends the recording.
"""

import argparse
import asyncio
import base64
import contextlib
import re
import ssl
import sys
import time

import h2.config
import h2.connection
import h2.events

COLUMNS = 96
CLUSTER = b"type.googleapis.com/envoy.config.cluster.v3.Cluster"
SECRET = re.compile(rb"PRIVATE KEY|[Bb]earer |[Tt]oken|eyJ[\w-]{10,}\.|/(?:root|home|tmp|work)/")


def find_secret(data):
    """Returns a secret in bytes, as it is or written as hex or base64."""
    views = [data]
    for run in re.findall(rb"[0-9a-fA-F]{8,}", data):
        views += [bytes.fromhex(run[at:][:(len(run) - at) // 2 * 2].decode()) for at in (0, 1)]
    # Other letters can precede the start of an encoding.
    for run in re.findall(rb"[\w+/-]{8,}", data.translate(bytes.maketrans(b"-_", b"+/"))):
        for part in (run[at:] for at in range(4)):
            part = part[:len(part) - (len(part) % 4 == 1)]
            views.append(base64.b64decode(part + b"=" * (-len(part) % 4)))
    return next(filter(None, map(SECRET.search, views)), None)


# ---------------------------------------------------------------- messages as text

def varint(number):
    coded = bytearray()
    while number > 127:
        coded.append(number & 127 | 128)
        number >>= 7
    return bytes(coded) + bytes([number])


def read_varint(data, at):
    number = shift = 0
    while True:
        byte = data[at]
        number, at = number | (byte & 127) << shift, at + 1
        if byte < 128:
            return number, at
        shift += 7


def fields(data):
    """Returns number, wire type and value of each field. Raises if it is no message."""
    found, at = [], 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = read_varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = data[at:at + size], at + size
        elif wire == 2:
            size, at = read_varint(data, at)
            value, at = data[at:at + size], at + size
        else:
            raise ValueError(wire)
        if number == 0 or at > len(data):
            raise ValueError(number)
        found.append((number, wire, value))
    return found


def encoded(found):
    coded = b""
    for number, wire, value in found:
        coded += varint(number << 3 | wire)
        if wire == 0:
            coded += varint(value)
        else:
            coded += (varint(len(value)) if wire == 2 else b"") + value
    return coded


def is_text(value):
    # The tag of a message's first field is a line feed, with which few texts begin.
    if value.startswith(b"\n"):
        return False
    try:
        return all(char.isprintable() or char == "\n" for char in value.decode())
    except UnicodeDecodeError:
        return False


def quoted(value):
    text = value.decode().replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def shown(data, indent=0):
    """Writes a message as its field numbers and values. The text has all that the bytes have."""
    parts = []
    for number, wire, value in fields(data):
        if wire == 0:
            parts.append(f"{number}: {value}")
        elif wire == 2 and is_text(value):
            parts.append(f"{number}: {quoted(value)}")
        elif wire == 2:
            try:
                if encoded(fields(value)) != value:
                    raise ValueError(value)
                parts.append(f"{number}: {shown(value, indent + 2)}")
            except (ValueError, IndexError):
                parts.append(f"{number}: x{value.hex()}")
        else:
            parts.append(f"{number}: {'fixed32' if wire == 5 else 'fixed64'} x{value.hex()}")
    line = "{" + " ".join(parts) + "}"
    if indent + len(line) <= COLUMNS and "\n" not in line:
        return line
    space = " " * (indent + 2)
    return "{\n" + "".join(f"{space}{part}\n" for part in parts) + " " * indent + "}"


def without_bodies(message):
    """Returns a discovery response with the name alone of each cluster."""
    def cluster(number, wire, value):
        if number == 2 and wire == 2:
            name = [field for field in fields(value) if field[0] == 1]
            return number, wire, encoded(name)
        return number, wire, value

    def resource(number, wire, value):
        if number == 2 and wire == 2:
            return number, wire, encoded([cluster(*field) for field in fields(value)])
        return number, wire, value

    found = fields(message)
    if (4, 2, CLUSTER) not in found:
        return message
    strip = lambda number, wire, value: (
        (number, wire, encoded([resource(*field) for field in fields(value)]))
        if number == 2 else (number, wire, value))
    return encoded([strip(*field) for field in found])


class Recording:
    def __init__(self, path, about):
        self.file, self.began, self.calls = open(path, "w"), time.monotonic(), 0
        for line in about:
            self.file.write(f"# {line}\n")

    def line(self, text, message=b""):
        if found := find_secret(text.encode()) or find_secret(message):
            sys.exit(f"the recording would have a secret or a path: {found[0]}")
        elapsed = round((time.monotonic() - self.began) * 1000)
        self.file.write(f"{elapsed} {text}\n")
        self.file.flush()


# ---------------------------------------------------------------- the proxy

class Side:
    """One connection of the proxy: to Strait, or to istiod."""

    def __init__(self, reader, writer, is_client):
        config = h2.config.H2Configuration(client_side=is_client, header_encoding=None,
                                           validate_inbound_headers=False)
        self.reader, self.writer = reader, writer
        self.http2 = h2.connection.H2Connection(config)
        self.http2.initiate_connection()
        self.queues, self.partial, self.peer = {}, {}, {}

    def flush(self):
        for stream, queue in self.queues.items():
            while queue:
                kind, value, end = queue[0]
                if kind == "headers":
                    self.http2.send_headers(stream, value, end_stream=end)
                elif kind == "data":
                    room = min(self.http2.local_flow_control_window(stream),
                               self.http2.max_outbound_frame_size)
                    if value and room <= 0:
                        break
                    self.http2.send_data(stream, value[:room])
                    if value[room:]:
                        queue[0] = (kind, value[room:], end)
                        continue
                elif kind == "end":
                    self.http2.end_stream(stream)
                queue.pop(0)
        self.writer.write(self.http2.data_to_send())


def messages(side, stream, data):
    """Returns the messages that have become complete: a flag and a length precede each."""
    buffer = side.partial.setdefault(stream, bytearray())
    buffer += data
    while len(buffer) >= 5 and len(buffer) >= 5 + (size := int.from_bytes(buffer[1:5], "big")):
        if buffer[0]:
            sys.exit("a message is compressed")
        yield bytes(buffer[5:5 + size])
        del buffer[:5 + size]


class Pair:
    """A connection of Strait, and the one to istiod that it leads to."""

    def __init__(self, strait, istiod, recording):
        self.strait, self.istiod, self.recording, self.calls = strait, istiod, recording, {}

    def handle(self, event, here, there):
        stream = getattr(event, "stream_id", None)
        other, is_strait = here.peer.get(stream), here is self.strait
        if isinstance(event, h2.events.RequestReceived):
            other = there.http2.get_next_available_stream_id()
            # A stream has to be begun before the next number is asked for.
            there.http2.send_headers(other, event.headers)
            here.peer[stream], there.peer[other] = other, stream
            there.queues[other], here.queues[stream] = [], []
            self.recording.calls += 1
            self.calls[stream] = self.recording.calls
            path = dict(event.headers)[b":path"].decode()
            self.recording.line(f"open {self.calls[stream]} {path}")
        elif isinstance(event, h2.events.DataReceived):
            here.http2.acknowledge_received_data(event.flow_controlled_length, stream)
            there.queues[other].append(("data", event.data, False))
            call = self.calls[stream if is_strait else other]
            for message in messages(here, stream, event.data):
                if not is_strait:
                    message = without_bodies(message)
                self.recording.line(f"{'>' if is_strait else '<'} {call} {shown(message)}", message)
        elif isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            end = event.stream_ended is not None
            there.queues[other].append(("headers", event.headers, end))
            status = dict(event.headers).get(b"grpc-status")
            if status is not None:
                self.recording.line(f"end {self.calls[other]} status {status.decode()}")
        elif isinstance(event, h2.events.StreamEnded) and is_strait:
            there.queues[other].append(("end", None, True))
        elif isinstance(event, h2.events.StreamReset) and other is not None:
            there.http2.reset_stream(other, event.error_code)
            self.recording.line(f"end {self.calls[stream if is_strait else other]} reset")
        elif isinstance(event, h2.events.ConnectionTerminated) and not is_strait:
            self.recording.line(f"goaway {int(event.error_code)}")
            # A GOAWAY is the end for the library, while open streams go on for Strait.
            self.strait.writer.write(goaway(event))

    async def pump(self, here, there):
        try:
            while data := await here.reader.read(65536):
                for event in here.http2.receive_data(data):
                    self.handle(event, here, there)
                here.flush()
                there.flush()
        except (OSError, h2.exceptions.ProtocolError) as error:
            print(f"a connection ends: {error}", file=sys.stderr)
        if here is self.istiod:
            for call in self.calls.values():
                self.recording.line(f"end {call} connection")
        here.writer.close()
        there.writer.close()


def goaway(event):
    payload = (2**31 - 1).to_bytes(4, "big") + int(event.error_code).to_bytes(4, "big")
    return len(payload).to_bytes(3, "big") + bytes([7, 0, 0, 0, 0, 0]) + payload


async def main():
    parser = argparse.ArgumentParser()
    for name in ("--listen", "--certificate", "--key", "--istiod", "--root"):
        parser.add_argument(name, required=True)
    parser.add_argument("--name", default="istiod.istio-system.svc")
    parser.add_argument("--about", action="append", default=[])
    parser.add_argument("file")
    args = parser.parse_args()
    recording = Recording(args.file, args.about)
    to_strait = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    to_strait.load_cert_chain(args.certificate, args.key)
    to_istiod = ssl.create_default_context(cafile=args.root)
    # Newer Pythons want extensions that neither istiod's certificates nor the tests' have.
    to_istiod.verify_flags &= ~ssl.VERIFY_X509_STRICT
    for context in (to_strait, to_istiod):
        context.set_alpn_protocols(["h2"])

    async def accept(reader, writer):
        host, port = args.istiod.rsplit(":", 1)
        try:
            istiod = await asyncio.open_connection(host, int(port), ssl=to_istiod,
                                                   server_hostname=args.name)
        except OSError:
            recording.line("refused")
            writer.close()
            return
        pair = Pair(Side(reader, writer, False), Side(*istiod, True), recording)
        pair.strait.flush()
        pair.istiod.flush()
        # The end of the recording cancels it.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(pair.pump(pair.strait, pair.istiod),
                                 pair.pump(pair.istiod, pair.strait))

    host, port = args.listen.rsplit(":", 1)
    await asyncio.start_server(accept, host, int(port), ssl=to_strait)
    print("listening", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        recording.line(f"mark {line.strip()}")
        print("marked", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
