#!/usr/bin/env python3
"""make top-picture: docs/top-operations.svg, -domains.svg, -processes.svg and -tenants.svg, from a real `braidfs top` in a terminal of its own
over a mount with a load on it."""

import fcntl
import html
import os
import pty
import re
import select
import struct
import sys
import termios
import time

import loaded

WIDTH, HEIGHT = 124, 22
SCREENS = {"operations": b"o", "domains": b"d", "processes": b"p", "tenants": b"e"}
# What top sends: control sequences, and text.
PIECE = re.compile(r"\x1b\[([?>]?)([0-9;]*)([@-~])|\x1b[()][A-Z0-9]|\x1b[=>78]|([^\x1b]+)", re.DOTALL)


class Screen:
    """As much of a terminal as top uses: positions, erasing, bold and reversed text."""

    def __init__(self):
        self.cells = {}
        self.row = self.column = 0
        self.bold = self.reversed = False

    def feed(self, text):
        for private, numbers, final, plain in PIECE.findall(text):
            if plain:
                self.write(plain)
            elif not private and final:
                self.control([int(n or 0) for n in numbers.split(";")], final)

    def write(self, text):
        for c in text:
            if c == "\r":
                self.column = 0
            elif c == "\n":
                self.row += 1
            elif c >= " ":
                self.cells[self.row, self.column] = (c, self.bold, self.reversed)
                self.column += 1

    def control(self, numbers, final):
        if final == "H":
            self.row, self.column = (max(n, 1) - 1 for n in (numbers + [1])[:2])
        elif final == "J":
            self.cells.clear()
        elif final == "K":
            self.cells = {at: c for at, c in self.cells.items() if at[0] != self.row or at[1] < self.column}
        elif final == "m":
            for n in numbers:
                if n in (0, 22):
                    self.bold = False
                if n in (0, 27):
                    self.reversed = False
                self.bold |= n == 1
                self.reversed |= n == 7
        elif final not in "hlrnqtuc":
            sys.exit(f"top-picture: top sends a sequence that is not known here: {numbers} {final}")

    def svg(self):
        advance, line, margin = 8.4, 18, 10
        w, h = WIDTH * advance + 2 * margin, HEIGHT * line + 2 * margin
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0f} {h}" font-family="monospace" font-size="14">',
            f'<rect width="{w:.0f}" height="{h}" rx="6" fill="#1c1f26"/>',
        ]
        for row in range(HEIGHT):
            column = 0
            while column < WIDTH:
                _, bold, turned = self.cells.get((row, column), (" ", False, False))
                run = ""
                start = column
                while column < WIDTH:
                    c = self.cells.get((row, column), (" ", False, False))
                    if c[1:] != (bold, turned):
                        break
                    run += c[0]
                    column += 1
                x, y, length = margin + start * advance, margin + row * line, len(run) * advance
                if turned:
                    out.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{line}" fill="#d8dee9"/>')
                if run.strip():
                    style = f'fill="{"#1c1f26" if turned else "#d8dee9"}"' + (' font-weight="bold"' if bold else "")
                    out.append(
                        f'<text x="{x:.1f}" y="{y + 13}" textLength="{length:.1f}" xml:space="preserve" {style}>{html.escape(run)}</text>'
                    )
        return "\n".join([*out, "</svg>", ""])


def pictures(mnt):
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(loaded.BINARY, [loaded.BINARY, "top", str(mnt)])
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    screen, found = Screen(), {}
    try:
        # the first is drawn when there are two samples
        for name, key in SCREENS.items():
            os.write(fd, key)
            until = time.monotonic() + 4
            data = b""
            while time.monotonic() < until:
                if select.select([fd], [], [], 0.2)[0]:
                    data += os.read(fd, 65536)
            screen.feed(data.decode(errors="replace"))
            found[name] = screen.svg()
        os.write(fd, b"q")
        while select.select([fd], [], [], 5)[0]:
            os.read(fd, 65536)
    except OSError:
        pass  # it has ended
    os.waitpid(pid, 0)
    os.close(fd)
    return found


def main():
    with loaded.mounted() as mnt:
        found = pictures(mnt)
    for name in SCREENS:
        svg = found.get(name, "")
        if "requests/s" not in svg:
            sys.exit(f"top-picture: top has drawn no {name}")
        path = loaded.ROOT / "docs" / f"top-{name}.svg"
        path.write_text(svg.replace(str(mnt.parent), ""))
        print(path.relative_to(loaded.ROOT))


if __name__ == "__main__":
    main()
