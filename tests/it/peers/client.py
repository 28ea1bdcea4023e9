"""Strict HTTP/2 client of the package `h2` before a gateway, and the endpoint behind it.

Both sides of each tunnel are here, so that every byte is compared. Each violation of RFC 9113 that
`h2` finds fails the run. TLS is OpenSSL: Python's `ssl`, which cannot send KeyUpdate, or
`openssl s_client`, which can. The last line is the number of tunnels by the reason of their end.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time

from h2.errors import ErrorCodes
from h2.settings import SettingCodes as Setting

# The folder is part of the sources.
sys.dont_write_bytecode = True
from connection import Failure, World, check  # noqa: E402

SCENARIO_SECONDS = 60
WINDOW_MAX = LAST_STREAM = 2**31 - 1


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
