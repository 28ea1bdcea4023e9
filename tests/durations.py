"""Runs `cargo test`, and prints the duration of each test binary and of the slowest tests, and
the skipped tests.

libtest reports no durations on stable Rust. It starts tests in the order of `--list`, one whenever
a thread is free, and prints a line at the end of each. So the first tests start at once, and each
of these lines is the start of the next test.
"""

import os
import re
import subprocess
import sys
import tempfile
import time

SLOWEST = 15
# Rows of the fault matrix that wait for minutes. `make faults` runs them.
SKIP = ["--skip", "faults::long"]
# Two minutes of waiting, which run beside all other tests.
BESIDE = "soak::random"
BINARY = re.compile(r"^ +Running (?:unittests )?(\S+) \((.+)\)$")
TEST = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. (?:ok|FAILED|ignored)")
RESULT = re.compile(r"^test result: ")
# A test that lacks a program or a right prints the first form, and passes.
SKIPPED = re.compile(r"^SKIPPED (.+)|^test (\S+) \.\.\. ignored")


def listed(path):
    output = subprocess.run([path, "--list", "--format", "terse", *SKIP, "--skip", BESIDE],
                            stdout=subprocess.PIPE, text=True, check=True).stdout
    return [line.removesuffix(": test") for line in output.splitlines()]


def main():
    # Twice as many as cores, as most tests wait for a socket or a deadline.
    threads = 2 * len(os.sched_getaffinity(0))
    os.environ.setdefault("RUST_TEST_THREADS", str(threads))
    threads = int(os.environ["RUST_TEST_THREADS"])
    command = ["cargo", "test", "--locked", *sys.argv[1:]]
    # The build alone has the terminal, so that cargo shows its progress.
    built = subprocess.run([*command, "--no-run"]).returncode
    if built != 0:
        return built
    beside = tempfile.TemporaryFile("w+")
    soak = subprocess.Popen([*command, "--test", "it", "--", BESIDE],
                            stdout=beside, stderr=subprocess.STDOUT)
    cargo = subprocess.Popen([*command, "--", *SKIP, "--skip", BESIDE],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    name, binaries, tests, skipped = "doc-tests", [], [], []
    begun, waiting, started = time.monotonic(), iter([]), {}
    for line in cargo.stdout:
        print(line, end="", flush=True)
        now = time.monotonic()
        if found := SKIPPED.match(line):
            skipped.append(found[1] or f"{name} {found[2]}: ignored")
        if found := BINARY.match(line):
            name, order = found[1], listed(found[2])
            begun, waiting = now, iter(order[threads:])
            started = dict.fromkeys(order[:threads], now)
        elif found := TEST.match(line):
            tests.append((now - started.pop(found[1], now), f"{name} {found[1]}"))
            started[next(waiting, None)] = now
        elif RESULT.match(line):
            binaries.append((now - begun, name))
            name, begun = "doc-tests", now
    ended = soak.wait()
    beside.seek(0)
    print(beside.read(), flush=True)
    print("\nduration of each test binary, and of the slowest tests")
    for seconds, what in sorted(binaries, reverse=True) + sorted(tests, reverse=True)[:SLOWEST]:
        print(f"{seconds:8.1f} s  {what}")
    if skipped:
        # .ci/run counts the lines that begin with the word.
        print(f"\n{len(skipped)} SKIPPED", *skipped, sep="\n  ")
    return cargo.wait() or ended


sys.exit(main())
