"""Link between two network devices that loses, delays, reorders, repeats and corrupts packets.

Usage: impaired_link.py SEED DEVICE DEVICE

It forwards frames until its standard input ends, and then prints how many it has impaired, as JSON.
netem would do the same, and many kernels are built without it. It needs CAP_NET_RAW.

Usage: impaired_link.py checksums DEVICE

It turns the checksum offload of a device off: a kernel leaves the checksums of offloaded packets
out, so that nobody would notice a corrupted one.
"""

import ctypes
import fcntl
import heapq
import json
import random
import select
import socket
import struct
import sys
import time

# Round trip 100 ms ± 20, as the row of docs/faults.md says.
DELAY, JITTER = 0.05, 0.01
LOST, REORDERED, REPEATED, CORRUPTED = 0.05, 0.01, 0.01, 0.01
# Delay of a packet that overtakes others.
EARLY = 0.03

# linux/sockios.h and linux/ethtool.h
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
ETH_P_ALL, PACKET_OUTGOING = 3, 4
FRAME_MAX, ETHERNET_HEADER = 65536, 14
IPV4 = b"\x08\x00"


def without_checksum_offload(device):
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def device(name):
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    packets.bind((name, 0))
    return packets


class Link:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.waiting, self.number = [], 0
        self.last = {}
        self.counts = dict.fromkeys(["forwarded", "lost", "reordered", "repeated", "corrupted"], 0)

    def happens(self, what, probability):
        is_now = self.random.random() < probability
        self.counts[what] += is_now
        return is_now

    def take(self, frame, to):
        """Queues a frame; none, or two, if it is impaired so."""
        if frame[12:14] != IPV4:
            return self.queue(time.monotonic(), frame, to)
        if self.happens("lost", LOST):
            return
        if self.happens("corrupted", CORRUPTED):
            at = self.random.randrange(ETHERNET_HEADER, len(frame))
            bit = 1 << self.random.randrange(8)
            frame = frame[:at] + bytes([frame[at] ^ bit]) + frame[at + 1 :]
        self.counts["forwarded"] += 1
        if self.happens("reordered", REORDERED):
            due = time.monotonic() + EARLY
        else:
            # Jitter alone reorders nothing.
            due = time.monotonic() + DELAY + self.random.uniform(-JITTER, JITTER)
            due = self.last[to] = max(due, self.last.get(to, 0))
        self.queue(due, frame, to)
        if self.happens("repeated", REPEATED):
            self.queue(due, frame, to)

    def queue(self, due, frame, to):
        self.number += 1
        heapq.heappush(self.waiting, (due, self.number, to, frame))

    def send_due(self):
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(self.waiting)
            to.send(frame)

    def timeout(self):
        return max(0, self.waiting[0][0] - time.monotonic()) if self.waiting else None


def main():
    if sys.argv[1] == "checksums":
        return without_checksum_offload(sys.argv[2])
    link, [one, two] = Link(int(sys.argv[1])), map(device, sys.argv[2:])
    other = {one: two, two: one}
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([one, two, sys.stdin], [], [], link.timeout())
        if sys.stdin in ready:
            return print(json.dumps(link.counts), flush=True)
        for source in ready:
            frame, address = source.recvfrom(FRAME_MAX)
            if address[2] != PACKET_OUTGOING:
                link.take(frame, other[source])
        link.send_due()


main()
