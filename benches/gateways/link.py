"""Long link: a delay, a loss and a rate for each packet between this host and a new network namespace.

Usage: link.py DELAY_MS LOSS_PERCENT MBYTES_PER_S (of each direction)

The namespace is the far side. All of 127.0.0.0/8 leads from it over the link, so that a gateway on
a loopback address is reached without another address. The script prints the id of a process in the
namespace and relays until it is killed; devices, routes and namespace end with it. It needs
CAP_NET_ADMIN and CAP_SYS_ADMIN. netem would do the same, and many kernels are built without it.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

# linux/if_tun.h: TUNSETIFF, IFF_TUN | IFF_NO_PI. The kernel segments and checksums for such devices.
TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
NEAR, FAR = "strait-near", "strait-far"
# Benchmark addresses of RFC 2544.
NEAR_IP, FAR_IP = "198.18.0.1", "198.18.0.2"
PACKET_MAX = 65536


def tun(name):
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), TUN_WITHOUT_HEADER))
    return device


def up(name, own, other, inside=()):
    localnet = f"echo 1 > /proc/sys/net/ipv4/conf/{name}/route_localnet"
    for command in (
        ["ip", "address", "add", own, "peer", other, "dev", name],
        ["ip", "link", "set", name, "up"],
        ["sh", "-c", localnet],
    ):
        subprocess.run([*inside, *command], check=True)


def far_side():
    """Starts a process in a new namespace, which ends with its standard input."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    if not process.stdout.readline():
        sys.exit("no network namespace")
    return process


def main():
    delay, loss, rate = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 100, float(sys.argv[3]) * 1e6
    devices = [tun(NEAR), tun(FAR)]
    process = far_side()
    inside = ["nsenter", f"--net=/proc/{process.pid}/ns/net"]
    subprocess.run(["ip", "link", "set", FAR, "netns", str(process.pid)], check=True)
    up(NEAR, NEAR_IP, FAR_IP)
    up(FAR, FAR_IP, NEAR_IP, inside)
    route = ["ip", "route", "add", "127.0.0.0/8", "dev", FAR, "src", FAR_IP]
    subprocess.run([*inside, *route], check=True)
    print(process.pid, flush=True)
    relay(devices, delay, loss, rate)


def relay(devices, delay, loss, rate):
    other = dict(zip(devices, reversed(devices)))
    # When each direction has sent its last packet; packets by the time when they are due.
    free, waiting, number = dict.fromkeys(devices, 0.0), [], 0
    while True:
        timeout = max(0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(devices, [], [], timeout)
        for device in ready:
            packet = os.read(device, PACKET_MAX)
            now = time.monotonic()
            sent = max(now, free[device]) + len(packet) / rate
            # A queue of one delay, and then loss, as in a router.
            if random.random() >= loss and sent < now + delay:
                free[device] = sent
                number += 1
                heapq.heappush(waiting, (sent + delay, number, other[device], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            os.write(device, packet)


main()
