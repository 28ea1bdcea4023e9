"""Terminal in memory: runs a program in it, presses keys, and shows its screen as HTML."""

import fcntl
import html
import os
import pty
import select
import struct
import termios
import time

import pyte

# Colours of the default text and of its background, and those that the program names.
TEXT, GROUND = "#d8dee4", "#14171a"
NAMED = {"red": "#f47067", "green": "#6bc46d", "brown": "#c69026", "yellow": "#c69026"}


class Terminal:
    def __init__(self, command, columns, lines):
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.process, self.file = pty.fork()
        if self.process == 0:
            # The size has to be there before the program asks for it.
            set_size(0, columns, lines)
            os.environ["TERM"] = "xterm-256color"
            os.execv(command[0], command)

    def press(self, keys):
        os.write(self.file, keys)

    def resize(self, columns, lines):
        self.screen.resize(lines, columns)
        set_size(self.file, columns, lines)

    def text(self):
        return "\n".join(self.screen.display)

    def until(self, condition, deadline):
        """Reads until the condition holds for the screen. Returns false after the deadline."""
        end = time.monotonic() + deadline
        while not condition(self.text()):
            ready, _, _ = select.select([self.file], [], [], max(0, end - time.monotonic()))
            if not ready:
                return False
            try:
                self.stream.feed(os.read(self.file, 65536))
            except OSError:  # The program has ended.
                return condition(self.text())
        return True

    def code(self):
        """Waits for the end of the program, and returns its exit code."""
        self.until(lambda _: False, 10)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def html(self):
        rows = (
            "".join(cell(self.screen.buffer[line][column]) for column in range(self.screen.columns))
            for line in range(self.screen.lines)
        )
        style = f"margin:0;padding:12px;width:max-content;color:{TEXT};background:{GROUND}"
        text = "\n".join(rows)
        return f'<meta charset="utf-8"><pre id="screen" style="{style};font:14px/1.25 monospace">{text}</pre>'


def set_size(file, columns, lines):
    fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def cell(char):
    color = NAMED.get(char.fg, TEXT)
    ground = GROUND
    if char.reverse:
        color, ground = ground, color
    weight = ";font-weight:bold" if char.bold else ""
    return f'<span style="color:{color};background:{ground}{weight}">{html.escape(char.data)}</span>'
