"""The live screen of `unbroken top`: the terminal, its keys, and reading again and again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from unbroken.cli.connection import Cluster, opened
from unbroken.cli.place import ClusterPlace
from unbroken.cli.terminal import raw, visible
from unbroken.errors import UnbrokenError
from unbroken.kube.clock import pause, processor, wall
from unbroken.spec.times import time_text

from .browsing import HELP, Browsing, read_keys
from .views import Contents, Line, Target, clean, lines

LEAST_SECONDS = 1.0
"""Seconds between two looks at the cluster."""
COST_FACTOR = 20.0
"""A look comes after this many times the processor time of the one before: 5 % of a core at most,
however many ranks there are."""
AGAIN_SECONDS = 2.0
"""Seconds until a cluster that did not answer is asked again."""
READ_BYTES = 256
TERMINATED = 143
"""Exit code after SIGTERM, as a shell reports it."""

Read = Callable[[Cluster, Target, float], Awaitable[Contents]]


class Top:
    """Shows one screen after another until the person ends it."""

    def __init__(self, place: ClusterPlace, namespace: str, read: Read, browsing: Browsing) -> None:
        self._place = place
        self._namespace = namespace
        self._read = read
        self._browsing = browsing
        # A size in the environment does not follow the window.
        kept = {key: one for key, one in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self._console = Console(file=raw(sys.stdout), highlight=False, markup=False, _environ=kept)
        self._contents: dict[Target, tuple[float, Contents]] = {}
        """Newest contents of the screens that are open, with the time of each."""
        self._problem = ""
        self._unread = b""
        self._is_stale = asyncio.Event()
        """Set when there is something new to show."""
        self._is_wanted = asyncio.Event()
        """Set when another screen was opened, whose contents are missing."""
        self._exit_code = 0

    async def run(self) -> int:
        """Show the screens; return the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._is_stale.set)
        loop.add_signal_handler(signal.SIGTERM, self._end, TERMINATED)
        live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with live, self._keys():
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read_always())
                while not self._browsing.has_ended:
                    live.update(self._frame(), refresh=True)
                    await self._is_stale.wait()
                    self._is_stale.clear()
                reading.cancel()
        return self._exit_code

    def _end(self, code: int) -> None:
        self._exit_code = code
        self._browsing.has_ended = True
        self._is_stale.set()

    @contextmanager
    def _keys(self) -> Iterator[None]:
        """Take single keys from standard input if it is a terminal; restore it at the end."""
        if not sys.stdin.isatty():
            yield
            return
        keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()
        before = termios.tcgetattr(keyboard)
        tty.setcbreak(keyboard)
        changed = termios.tcgetattr(keyboard)
        changed[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell with this screen
        termios.tcsetattr(keyboard, termios.TCSADRAIN, changed)
        loop.add_reader(keyboard, self._pressed, keyboard)
        try:
            yield
        finally:
            loop.remove_reader(keyboard)
            termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)

    def _pressed(self, keyboard: int) -> None:
        try:
            data = os.read(keyboard, READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._end(0)  # the terminal is gone
            return
        keys, self._unread = read_keys(self._unread + data)
        for key in keys:
            before = self._browsing.target
            self._browsing.press(key, self._lines(), self._height())
            if self._browsing.target != before:
                self._is_wanted.set()
        self._is_stale.set()

    def _height(self) -> int:
        """Lines between the line at the top and that of the keys."""
        return max(self._console.height - 2, 1)

    def _lines(self) -> list[Line]:
        target = self._browsing.target
        if target not in self._contents:
            return [Line("reading ...")]
        at, contents = self._contents[target]
        return lines(target, contents, at, self._console.width)

    def _frame(self) -> Group:
        """Return the lines for the terminal."""
        found, height = self._lines(), self._height()
        top, marked = self._browsing.window(found, height)
        shown = [self._top_line()]
        for number, line in enumerate(found[top : top + height], top):
            style = f"{line.style} reverse".strip() if number == marked else line.style
            shown.append(self._text(line.text or " ", style))
        shown += [self._text(" ", "")] * (height + 1 - len(shown))
        more = f"   {marked + 1}/{len(found)}" if len(found) > height else ""
        return Group(*shown, self._text(f"{HELP}{more}", "dim"))

    def _top_line(self) -> Text:
        at = self._contents.get(self._browsing.target, (None, {}))[0]
        when = "" if at is None else f"  {time_text(at)}"
        if self._problem:
            since = "" if at is None else f"; shown is what was read at {time_text(at)}"
            return self._text(f"not up to date: {clean(self._problem)}{since}", "bold red")
        paths = self._place.paths
        where = "" if paths is None else f"  {visible(str(paths.directory))}"
        return self._text(f"unbroken top{when}{where}", "bold")

    def _text(self, text: str, style: str) -> Text:
        result = Text(text, style, no_wrap=True, overflow="crop")
        result.truncate(self._console.width, overflow="crop")
        return result

    async def _read_always(self) -> None:
        """Read the open screen again and again, also after the cluster was away."""
        while True:
            try:
                await self._read_while_connected()
            except UnbrokenError as error:
                self._problem = str(error)
            self._is_stale.set()
            await pause(AGAIN_SECONDS)

    async def _read_while_connected(self) -> None:
        async with opened(self._place, self._namespace) as cluster:
            while True:
                self._is_wanted.clear()
                target, began = self._browsing.target, processor()
                now = wall()
                contents = await self._read(cluster, target, now)
                open_now = {one.target for one in self._browsing.screens}
                kept = {key: one for key, one in self._contents.items() if key in open_now}
                self._contents = {**kept, target: (now, contents)}
                self._problem = ""
                self._is_stale.set()
                wait = max(LEAST_SECONDS, COST_FACTOR * (processor() - began))
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._is_wanted.wait()


def show(place: ClusterPlace, namespace: str, read: Read, browsing: Browsing) -> int:
    """Show the live screen until its end; return the exit code."""

    async def run() -> int:
        return await Top(place, namespace, read, browsing).run()

    return asyncio.run(run())
