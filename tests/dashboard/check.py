"""Opens /dashboard of a running gateway in a headless Chromium, and checks what it shows.

Usage: check.py STRAIT CHROMIUM. The gateways are those of deploy/examples/regions, with a gateway
of a third network that does not answer, open tunnels, a refusal and a drain. The page is opened in
a light, a dark and a narrow window: without violations of axe-core's rules, without errors in the
console, which are also those of the page's policy, and without markup from names. `strait top` shows
the same gateway in a terminal in memory. Screenshots go to target/dashboard, and with
STRAIT_UPDATE=1 to docs/images.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from terminal import Terminal

TOP = pathlib.Path(__file__).parent.parent.parent
EXAMPLE = TOP / "deploy" / "examples" / "regions"
UPDATE = os.environ.get("STRAIT_UPDATE") == "1"
IMAGES = TOP / ("docs/images" if UPDATE else "target/dashboard")
# Addresses of this check alone, in place of those of the example.
EAST, WEST, SOUTH = "127.61.1.", "127.61.2.", "127.61.3."
ADMIN = f"http://{EAST}1:15000"
DEADLINE = 30

# Appended to the configuration of east.
MORE = f"""
links:
  - {{from: north, to: east}}
  - {{from: east, to: west, budget: {{bytes: 64MiB, period: 1h}}}}
  - {{from: east, to: south}}
"""
NETWORK = f"""
  - name: south
    cluster: south
    gateways: ["{SOUTH}1:15008"]
"""
# (name, width, height, colour scheme)
WINDOWS = [("light", 1100, 590, "light"), ("dark", 1100, 590, "dark"), ("phone", 390, 620, "light")]
SEARCH = "search.shop.svc.cluster.local"
CHECKOUT = "checkout.shop.svc.cluster.local"
# Number of tunnels to the first of them; the other has one.
TUNNELS = 20
# Each would run or load something as markup.
PLANTED = "<script>window.planted = 1</script><img src=x onerror='window.planted = 1'>"


def fail(text):
    sys.exit(f"check-dashboard: {text}")


def until(what, condition):
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    fail(f"{what} did not happen within {DEADLINE} s")


def page(name):
    try:
        with urllib.request.urlopen(f"{ADMIN}/{name}", timeout=DEADLINE) as answer:
            return json.load(answer)
    except urllib.error.URLError:
        return {}


class World:
    """Gateways of two networks with pods and clients, in a folder."""

    def __init__(self, strait, folder):
        self.strait, self.folder, self.started = strait, folder, []

    def start(self, *arguments):
        log = open(self.folder / f"{len(self.started)}.log", "wb")
        command = [self.strait, *map(str, arguments)]
        self.started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder))

    def run(self, *arguments):
        command = [self.strait, *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        return done.stdout + done.stderr

    def stop(self):
        for process in self.started:
            process.kill()
        for process in self.started:
            process.wait()

    def load(self, kind, service, client, *more):
        leaf = self.folder / "certs" / client
        return (
            "load", kind, "--to", f"{EAST}1:15008", "--authority", f"{service}:80",
            "--chain", f"{leaf}.crt", "--key", f"{leaf}.key", "--roots", "certs/root.crt", *more,
        )

    def fill(self):
        files = self.folder / "deploy" / "examples" / "regions"
        files.mkdir(parents=True)
        for file in EXAMPLE.iterdir():
            text = file.read_text().replace("127.1.0.", EAST).replace("127.2.0.", WEST)
            if file.name == "east.yaml":
                text = text.replace("\nexposure:", f"{NETWORK}\nexposure:", 1)
                text = text.replace("dial: {", "dial: {probe_interval: 1s, ", 1) + MORE
            (files / file.name).write_text(text)
        clusters = [word for name in ("east", "west", "north") for word in ("--cluster", name)]
        self.run("certs", "certs", *clusters)
        for name in ("west", "east"):
            self.start("run", "-c", files / f"{name}.yaml")
        for pod in (f"{EAST}11", f"{EAST}12", f"{WEST}11", f"{WEST}12"):
            self.start(
                "load", "serve", "--hbone", "--bind", f"{pod}:15008", "--chain", "certs/endpoint.crt",
                "--key", "certs/endpoint.key", "--roots", "certs/root.crt",
            )
        until("a ready gateway", lambda: page("status").get("ready"))
        peer = "client-north"
        for service, streams in ((SEARCH, TUNNELS), (CHECKOUT, 1)):
            work = self.load("idle", service, peer, "--streams", streams, "--seconds", 600)
            self.start(*work)
        # Both are refused: the name is unknown, and the link of west is missing.
        self.run(*self.load("rr", "payments.shop.svc.cluster.local", peer, "--seconds", 1))
        self.run(*self.load("rr", SEARCH, "client", "--seconds", 1))
        until("open tunnels", lambda: sum(
            row["tunnels"] for row in page("status")["services"]["list"]) == TUNNELS + 1)
        self.run("drain", "service", CHECKOUT, "--admin", f"{EAST}1:15000")
        until("a gateway that fails", lambda: any(
            row["error"] for row in page("peers").get("gateways", [])))
        until("refusals", lambda: page("refusals").get("refusals"))


def open_page(browser, window, errors):
    name, width, height, scheme = window
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened = context.new_page()
    opened.set_default_timeout(1000 * DEADLINE)
    opened.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    return opened


def check_rules(opened, name):
    found = Axe().run(opened).response["violations"]
    for one in found:
        for node in one["nodes"]:
            print(f"{name}: {one['id']}: {one['help']}: {node['html'][:200]}", file=sys.stderr)
    if found:
        fail(f"{name}: axe-core finds {len(found)} violations")


def check_window(browser, window):
    """Opens the page, compares it with the JSON, and takes a screenshot."""
    errors, name = [], window[0]
    opened = open_page(browser, window, errors)
    opened.goto(f"{ADMIN}/dashboard")
    opened.wait_for_selector("#map svg")
    peers = page("peers")
    text = opened.inner_text("main")
    shown = [row["address"] for row in peers["gateways"]]
    shown += [row["reason"] for row in page("refusals")["refusals"]]
    shown += [row["service"] for row in page("status")["services"]["list"]]
    shown += ["Connection refused", "strait explain --from", f"strait drain service {CHECKOUT} --undo"]
    for expected in shown:
        if expected not in text:
            fail(f"{name}: the page lacks {expected!r}")
    width = opened.evaluate("document.documentElement.scrollWidth")
    if width > window[1]:
        fail(f"{name}: the page is {width} pixels wide, the window {window[1]}")
    check_rules(opened, name)
    opened.screenshot(path=IMAGES / f"dashboard-{name}.png")
    if errors:
        fail(f"{name}: errors in the console: {errors}")
    opened.context.close()


def check_keyboard(browser):
    """Asks for the endpoints of a service without a mouse, and keeps the focus over events."""
    errors = []
    opened = open_page(browser, WINDOWS[0], errors)
    opened.goto(f"{ADMIN}/dashboard")
    opened.wait_for_selector("#service-table tbody tr")
    focus = "document.activeElement.textContent.trim() || document.activeElement.id"
    order = []
    while "service" not in order and len(order) < 40:
        opened.keyboard.press("Tab")
        order.append(opened.evaluate(focus))
    if order[0] != "Skip to content" or "service" not in order:
        fail(f"the focus takes the way {order}")
    opened.keyboard.type("search")
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#endpoint-table tbody tr")
    rows = opened.inner_text("#endpoint-table")
    if "east//Pod/shop/search-1" not in rows or f"{WEST}1:15008" not in rows:
        fail(f"the endpoints are {rows}")
    check_rules(opened, "endpoints")
    opened.focus("#service-table tbody button")
    before = opened.evaluate("last.status.at")
    until("the next event", lambda: opened.evaluate("last.status.at") != before)
    if opened.evaluate(focus) != page("status")["services"]["list"][0]["service"]:
        fail("an event moves the focus")
    if errors:
        fail(f"errors in the console: {errors}")
    opened.context.close()


def planted(value):
    """Puts markup into each text of a page that is not a time."""
    if isinstance(value, dict):
        return {key: planted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [planted(item) for item in value]
    is_time = isinstance(value, str) and value[:2] == "20" and value.endswith("Z")
    return value + PLANTED if isinstance(value, str) and not is_time else value


def check_planted(browser):
    """Sends an event whose names are markup, which the page has to show as text."""
    errors = []
    opened = open_page(browser, WINDOWS[0], errors)
    event = {name: planted(page(name)) for name in ("status", "peers", "refusals")}
    body = f"retry: 60000\n\ndata: {json.dumps(event)}\n\n"
    kind = {"content-type": "text/event-stream"}
    opened.route("**/dashboard/events", lambda route: route.fulfill(body=body, headers=kind))
    opened.goto(f"{ADMIN}/dashboard")
    opened.wait_for_selector("#service-table tbody tr")
    if PLANTED not in opened.inner_text("#service-table"):
        fail("the page does not show the name of a service as it is")
    found = opened.evaluate("[document.querySelectorAll('main script, main img').length, window.planted]")
    if found != [0, None] or errors:
        fail(f"a name is markup: {found}, {errors}")
    opened.context.close()


def check_top(browser, strait):
    """Goes through the tabs of `strait top`, resizes it, and takes a screenshot of one tab."""
    opened = Terminal([str(strait), "top", "--admin", f"{EAST}1:15000"], 126, 24)

    def shows(*parts):
        if not opened.until(lambda text: all(part in text for part in parts), DEADLINE):
            fail(f"top: {parts} are not all on the screen:\n{opened.text()}")

    shows("cluster east", "Gateways of other networks", f"{SOUTH}1:15008")
    # The last lines show the whole error of the selected row, the second one.
    opened.press(b"\x1b[B")
    shows("LAST ERROR  ", "Connection refused")
    opened.press(b"\t")
    shows("Services", SEARCH, "search-1", f"{WEST}1:15008")
    picture = browser.new_page()
    picture.set_content(opened.html())
    picture.locator("#screen").screenshot(path=IMAGES / "top.png")
    opened.press(b"\x1b[C")
    shows("Open tunnels by source", "100%")
    opened.press(b"\x1b[C")
    shows("Refusals of the last 15 minutes", "strait explain --from")
    opened.resize(80, 16)
    shows("q ends", "strait explain --from")
    if "q ends" not in "".join(opened.screen.display[-3:]):
        fail(f"top: the keys are not at the bottom after a resize:\n{opened.text()}")
    opened.press(b"\x1b[C\x1b[C")
    shows("Drained by an operator", f"strait drain service {CHECKOUT} --undo")
    opened.press(b"q")
    if opened.code() != 0:
        fail("top: q does not end it with the exit code 0")


def main():
    strait, chromium = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        world = World(strait, pathlib.Path(folder))
        try:
            world.fill()
            # A container seldom permits Chromium's sandbox. The page is our own.
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-lcd-text"])
            IMAGES.mkdir(parents=True, exist_ok=True)
            check_top(browser, strait)
            for window in WINDOWS:
                check_window(browser, window)
            check_keyboard(browser)
            check_planted(browser)
            browser.close()
        finally:
            world.stop()
    sizes = {image.name: image.stat().st_size for image in sorted(IMAGES.glob("*.png"))}
    print(f"the dashboard passes in {len(WINDOWS)} windows, and in a terminal; screenshots in {IMAGES.relative_to(TOP)}: {sizes}")


main()
