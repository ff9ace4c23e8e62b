"""The progress of a host's download, passed from its agent to the command that waits for the job.

    agent: Progress.draw() --> hosts/HOST.progress --> job_wait(): Display.show() --> a bar on the terminal

The agent's own stderr is runner.log, so it draws no bar itself."""
from __future__ import annotations

import shutil
import time
from typing import TextIO

from shoal.job.document.folder import Amount, JobFolder

LINE_EVERY_S = 10.0  # without a terminal
WIDTH_MAX, WIDTH_MIN = 40, 10  # of the bar


def bytes_text(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def text_of(amount: Amount) -> str:
    return f"{amount.what}: {bytes_text(amount.bytes)} of {bytes_text(amount.size)}, {bytes_text(amount.rate)}/s"


def share_of(amount: Amount) -> float:
    return min(amount.bytes / amount.size, 1.0) if amount.size else 1.0


def bar_of(amount: Amount, host: str = "") -> str:
    """Draws the bar, one line of a terminal."""
    what, share = f"{host}: {amount.what}" if host else amount.what, share_of(amount)
    width = max(min(shutil.get_terminal_size().columns - len(what) - 50, WIDTH_MAX), WIDTH_MIN)
    full = int(share * width)
    return f"{what} [{'#' * full}{'.' * (width - full)}] {100 * share:3.0f} % of {bytes_text(amount.size)}, {bytes_text(amount.rate)}/s"


class Display:
    """Shows on `told` the download of the host that is furthest behind: as a bar on a terminal, else as a line every ten
    seconds."""

    def __init__(self, folder: JobFolder, told: TextIO):
        self.folder, self.told = folder, told
        self.is_terminal = told.isatty()
        self.is_drawn = False
        self.line_at = time.monotonic() + LINE_EVERY_S

    def show(self) -> None:
        coming = self.folder.progress()
        if not coming:
            self.clear()
            return
        host, amount = min(coming.items(), key=lambda one: share_of(one[1]))
        named = host if len(self.folder.status().hosts) > 1 else ""
        if self.is_terminal:
            self._write(f"\r{bar_of(amount, named)}\x1b[K")
            self.is_drawn = True
        elif time.monotonic() >= self.line_at:
            self.line_at = time.monotonic() + LINE_EVERY_S
            self._write(f"shoal job: {self.folder.name}: {named + ': ' if named else ''}{text_of(amount)}\n")

    def clear(self) -> None:
        """Removes the bar before another line is written to the terminal."""
        if self.is_drawn:
            self._write("\r\x1b[K")
        self.is_drawn = False

    def _write(self, text: str) -> None:
        self.told.write(text)
        self.told.flush()
