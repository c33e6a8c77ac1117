"""Containers as real processes: ends, signals, leftovers, namespaces, adoption."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import WorldError
from unbroken.local.node.pods.events import Exit
from unbroken.local.node.processes.cri_log import parsed
from unbroken.local.node.processes.isolation import Isolation
from unbroken.local.node.processes.limits import Limits
from unbroken.local.node.processes.process import MARKER, Launcher, Run, adopt, marked, readable
from unbroken.local.node.processes.supervisor import SIGKILL_ALL, SIGTERM

pytestmark = pytest.mark.slow


class Host:
    """A launcher and a place for containers."""

    def __init__(self, directory: Path, launcher: Launcher) -> None:
        self.directory = directory
        self.launcher = launcher

    async def start(self, name: str, *argv: str, **fields: Any) -> Run | Exit:
        """Start a container."""
        directory = self.directory / name
        (directory / "scratch").mkdir(parents=True)
        request = {
            "directory": str(directory),
            "argv": list(argv),
            "env": {"PATH": os.environ["PATH"], MARKER: str(directory)},
            "cwd": str(directory),
            "isolation": self.launcher.isolation.value,
            "hostname": "",
            "mounts": [],
            "scratch": str(directory / "scratch"),
            **fields,
        }
        return await self.launcher.run(request, {MARKER: str(directory)}, 0.0)

    async def alive(self, name: str, *argv: str, **fields: Any) -> Run:
        """Start a container that must come to life."""
        run = await self.start(name, *argv, **fields)
        assert isinstance(run, Run)
        return run

    async def result(self, name: str, *argv: str, **fields: Any) -> tuple[Exit, str]:
        """Run a container to its end; return its exit and its output."""
        run = await self.start(name, *argv, **fields)
        ended = run if isinstance(run, Exit) else await run.ended()
        return ended, output(self.directory / name)


def output(directory: Path) -> str:
    """Return the output of a container."""
    log = directory / "log"
    lines = log.read_bytes().split(b"\n") if log.exists() else []
    entries = [entry for line in lines if (entry := parsed(line))]
    return b"".join(e.text + (b"" if e.is_partial else b"\n") for e in entries).decode()


@asynccontextmanager
async def host(directory: Path) -> AsyncIterator[Host]:
    """Run a launcher, which is gone at the end."""
    launcher = Launcher(directory / "launcher")
    await launcher.start()
    try:
        yield Host(directory, launcher)
    finally:
        await launcher.close()
        assert (directory / "launcher/launcher.log").read_text() == ""


def on_host(directory: Path, story: Callable[[Host], Awaitable[None]]) -> None:
    """Run a story on a fresh host."""

    async def go() -> None:
        async with asyncio.timeout(60), host(directory) as made:
            await story(made)

    asyncio.run(go())


async def said(directory: Path, word: str) -> None:
    """Wait until the container has printed a word."""
    from unbroken.nodes.file_watch import DirectoryWatch

    with DirectoryWatch(directory) as watch:
        while word not in output(directory):
            watch.changed.clear()
            if word in output(directory):
                return
            await watch.changed.wait()


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (["true"], 0, ""),
        (["sh", "-c", "exit 3"], 3, ""),
        (["sh", "-c", "kill -9 $$"], 137, ""),
        (["no-such-program"], 128, "StartError"),
        (["/no/such/program"], 128, "StartError"),
        (["/etc/passwd"], 128, "StartError"),
    ],
)
def test_ends(tmp_path: Path, argv: list[str], code: int, reason: str) -> None:
    async def story(host: Host) -> None:
        ended, _ = await host.result("c", *argv)
        assert (ended.exit_code, ended.reason) == (code, reason)
        if reason:
            assert argv[0] in ended.message

    on_host(tmp_path, story)


def test_output_is_logged_in_order_with_its_stream(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        ended, text = await host.result("c", "sh", "-c", "echo out; echo err >&2; printf tail")
        assert ended.exit_code == 0
        assert sorted(text.splitlines()) == ["err", "out", "tail"]
        streams = {line.split()[1] for line in (tmp_path / "c/log").read_text().splitlines()}
        assert streams == {"stdout", "stderr"}

    on_host(tmp_path, story)


def test_a_large_output_is_complete(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        _, text = await host.result("c", "seq", "100000")
        assert text.split() == [str(number) for number in range(1, 100_001)]

    on_host(tmp_path, story)


def test_a_terminal_is_given_where_asked_for(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        _, text = await host.result("c", "sh", "-c", "test -t 0 && test -t 1 && echo yes", tty=True)
        assert text == "yes\r\n"

    on_host(tmp_path, story)


def test_sigterm_goes_to_the_program_and_its_answer_counts(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        run = await host.alive(
            "c", "sh", "-c", "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.05; done"
        )
        await said(tmp_path / "c", "up")
        run.signal(SIGTERM)
        assert (await run.ended()).exit_code == 5
        assert "bye" in output(tmp_path / "c")

    on_host(tmp_path, story)


DAEMON = """
import os, signal, sys, time
for _ in range(2):
    if os.fork():
        {parent}
    os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("daemon", flush=True)
time.sleep(1000)
"""


def test_a_daemon_dies_with_the_program_that_left_it(tmp_path: Path) -> None:
    script = DAEMON.format(parent="time.sleep(0.3) or os._exit(7)")

    async def story(host: Host) -> None:
        run = await host.alive("c", sys.executable, "-c", script)
        await said(tmp_path / "c", "daemon")
        assert (await run.ended()).exit_code == 7
        assert marked(str(tmp_path / "c")) == []

    on_host(tmp_path, story)


def test_kill_ends_the_program_and_its_daemons_though_they_ignore_sigterm(tmp_path: Path) -> None:
    script = DAEMON.format(parent="time.sleep(1000)")

    async def story(host: Host) -> None:
        run = await host.alive("c", sys.executable, "-c", script)
        await said(tmp_path / "c", "daemon")
        assert len(marked(str(tmp_path / "c"))) == 3
        run.signal(SIGKILL_ALL)
        assert (await run.ended()).exit_code == 137
        assert marked(str(tmp_path / "c")) == []

    on_host(tmp_path, story)


def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    script = DAEMON.format(parent="time.sleep(1000)")

    async def story(host: Host) -> None:
        run = await host.alive("c", sys.executable, "-c", script)
        await said(tmp_path / "c", "daemon")
        os.kill(run.supervisor, signal.SIGKILL)
        ended = await run.ended()
        assert ended.reason == "ContainerStatusUnknown"
        assert marked(str(tmp_path / "c")) == []

    on_host(tmp_path, story)


def test_commands_run_inside_and_die_with_the_container(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        run = await host.alive("c", "sleep", "1000")
        request = {
            "argv": ["sh", "-c", f"echo ${MARKER} > seen; echo begun; exec sleep 1000"],
            "cwd": str(tmp_path / "c"),
            "join": run.main,
            "isolation": host.launcher.isolation.value,
        }
        null, (out, into) = os.open(os.devnull, os.O_RDWR), os.pipe()
        command = await host.launcher.command(request, [null, into, null])
        os.close(into)
        assert await asyncio.to_thread(os.read, out, 100) == b"begun\n"
        os.close(out)
        quick = await host.launcher.command({**request, "argv": ["sh", "-c", "exit 4"]}, [null] * 3)
        os.close(null)
        assert await quick.ended() == 4
        run.signal(SIGKILL_ALL)
        await run.ended()
        with pytest.raises(WorldError, match="container ended"):
            await command.ended()
        command.close()
        quick.close()
        assert (tmp_path / "c/seen").read_text() == f"{tmp_path / 'c'}\n"
        assert marked(str(tmp_path / "c")) == []

    on_host(tmp_path, story)


def test_a_command_dies_when_its_client_goes_away(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        run = await host.alive("c", "sleep", "1000")
        read, write = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        request = {
            "argv": ["sleep", "1000"],
            "cwd": "/",
            "join": run.main,
            "isolation": host.launcher.isolation.value,
        }
        command = await host.launcher.command(request, [null, write, null])
        os.close(write)
        os.close(null)
        command.close()
        await readable(read)
        assert os.read(read, 1) == b"", "its end closes the pipe"
        os.close(read)
        run.signal(SIGKILL_ALL)
        await run.ended()

    on_host(tmp_path, story)


@pytest.mark.parametrize("kind", [Isolation.ROOT, Isolation.USER])
def test_mounts_appear_where_the_host_has_nothing(tmp_path: Path, kind: Isolation) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume/file").write_text("hello")
    (tmp_path / "single").write_text("alone")
    mounts = [
        [str(tmp_path / "volume"), "/unbroken-test/deep", False],
        [str(tmp_path / "volume"), "/etc/unbroken-test", True],
        [str(tmp_path / "single"), "/unbroken-test/deep/inside", False],
        [str(tmp_path / "volume"), "/tmp", False],
    ]
    text = (
        "cat /unbroken-test/deep/file /unbroken-test/deep/inside /tmp/file; id -u; hostname;"
        "touch /etc/unbroken-test/x 2>/dev/null || echo read-only;"
        "test -c /dev/null && ls /etc/passwd"
    )

    async def story(host: Host) -> None:
        if host.launcher.isolation is Isolation.NONE:
            pytest.skip("this host allows no namespaces")
        if kind is Isolation.ROOT and os.geteuid() != 0:
            pytest.skip("not root")
        fields = {"mounts": mounts, "isolation": kind.value, "hostname": "pod-name", "cwd": "/"}
        ended, said = await host.result("c", "sh", "-c", text, **fields)
        assert said.splitlines() == [
            f"helloalonehello{os.geteuid()}",
            "pod-name",
            "read-only",
            "/etc/passwd",
        ]
        assert ended.exit_code == 0
        assert not {"unbroken-test"} & {*os.listdir("/"), *os.listdir("/etc")}
        assert (tmp_path / "volume/inside").read_text() == "", "made as the place of a mount"

    on_host(tmp_path, story)


def test_a_program_starts_in_well_under_a_tenth_of_a_second(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        loop = asyncio.get_running_loop()
        took = []
        for number in range(5):
            began = loop.time()
            run = await host.alive(f"c{number}", "true")
            took.append(loop.time() - began)
            await run.ended()
        assert min(took) < 0.05

    on_host(tmp_path, story)


def test_the_launcher_is_started_again_when_it_dies(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        first = await host.alive("c", "sleep", "1000")
        (launcher,) = [
            int(name)
            for name in os.listdir("/proc")
            if name.isdigit() and f"{tmp_path}" in _open_error_file(int(name))
        ]
        fd = os.pidfd_open(launcher)
        os.kill(launcher, signal.SIGKILL)
        await readable(fd)
        os.close(fd)
        ended, _ = await host.result("d", "sh", "-c", "exit 6")
        assert ended.exit_code == 6
        first.signal(SIGKILL_ALL)
        assert (await first.ended()).exit_code == 137

    on_host(tmp_path, story)


def _open_error_file(pid: int) -> str:
    """Return the file behind a launcher's stderr; empty for any other process."""
    try:
        if b"launcher" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return ""
        is_supervisor = Path(f"/proc/{pid}/comm").read_text() == "unbroken-pod\n"
        return "" if is_supervisor else os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return ""


@pytest.fixture
def limits() -> Iterator[Limits]:
    """Provide control groups of a node for tests, if this host has them."""
    made = Limits(f"test-{os.getpid()}")
    made.find()
    if made.problem:
        pytest.skip(made.problem)
    yield made
    made.tidy(())


def test_what_takes_more_memory_than_its_limit_is_killed_and_named(
    tmp_path: Path, limits: Limits
) -> None:
    async def story(host: Host) -> None:
        groups = limits.create("greedy", {"limits": {"memory": "64Mi"}})
        text = "held = bytearray(1_000_000_000)"
        ended, _ = await host.result("greedy", sys.executable, "-c", text, cgroups=groups)
        assert (ended.exit_code, ended.reason) == (137, "OOMKilled")
        limits.remove("greedy")
        with pytest.raises(FileNotFoundError):
            os.stat(groups[0])

    on_host(tmp_path, story)


# --- a runner that is killed

RUNNER = """
import asyncio, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.local.node.test_node_process import host

async def main():
    async with host(Path(sys.argv[1])) as made:
        for name, text in json.loads(sys.argv[3]).items():
            await made.alive(name, "sh", "-c", text)
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def killed_runner(directory: Path, containers: dict[str, str]) -> None:
    """Start containers from another runner, and kill that runner without warning."""
    arguments = [str(directory), str(Path(__file__).parents[3]), json.dumps(containers)]
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, *arguments], stdout=subprocess.PIPE, text=True
    )
    with runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == "ready\n"
        runner.kill()


async def test_after_a_killed_runner_containers_go_on_and_their_ends_are_known(
    tmp_path: Path,
) -> None:
    end, go_on = tmp_path / "end", tmp_path / "go-on"
    os.mkfifo(end)
    killed_runner(
        tmp_path,
        {
            "ended": f"cat {end}; echo last; exit 9",
            "alive": f"cat > {go_on}; sleep 1000",
        },
    )
    end.write_text("x")

    async def story() -> None:
        ended = adopt(tmp_path / "ended")
        if isinstance(ended, Run):
            ended = await ended.ended()
        assert isinstance(ended, Exit)
        assert ended.exit_code == 9
        assert "last" in output(tmp_path / "ended")
        alive = adopt(tmp_path / "alive")
        assert isinstance(alive, Run)
        assert alive.main in marked(str(tmp_path / "alive"))
        alive.signal(SIGKILL_ALL)
        assert (await alive.ended()).exit_code == 137
        assert marked(str(tmp_path / "alive")) == []

    await asyncio.wait_for(story(), 60)


async def test_a_supervisor_lost_while_no_runner_was_there_is_cleaned_up_after(
    tmp_path: Path,
) -> None:
    killed_runner(tmp_path, {"c": "sleep 1000"})
    found = adopt(tmp_path / "c")
    assert isinstance(found, Run)
    os.kill(found.supervisor, signal.SIGKILL)
    await readable(found.pidfd)
    ended = adopt(tmp_path / "c")
    assert isinstance(ended, Exit)
    assert ended.reason == "ContainerStatusUnknown"
    assert marked(str(tmp_path / "c")) == []


def test_a_run_whose_record_was_never_written_never_was(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert adopt(tmp_path / "c") is None


def test_a_record_whose_process_number_belongs_to_another_is_not_adopted(tmp_path: Path) -> None:
    record = {"supervisor": os.getpid(), "ticks": 1, "at": 5.0, MARKER: "nobody-has-this"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    ended = adopt(tmp_path)
    assert isinstance(ended, Exit)
    assert ended.reason == "ContainerStatusUnknown"
