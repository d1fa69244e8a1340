"""A sandbox's init: pid 1 of its namespaces, and its only door.

It reaps, runs one command at a time and moves files, on requests from the
channel (`wire.py`). It keeps all capabilities of its user namespace and its
commands do not, so that they cannot trace it or read its memory; when it ends,
the kernel ends everything in the sandbox.

It sees three mount namespaces: its own (the sandbox's disk, with the agent's
root at `/m`), the agent's, and the verifier's while there is one (`views.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import stat
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from t1jax.sandbox import kernel, launcher, views, wire
from t1jax.sandbox.output import Output

_MAX_STATE = 1 << 20
_ENVIRONMENT = {"HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}


class Init:
  """The server; `serve` never returns."""

  def __init__(
    self,
    counters: dict[str, list[int]],
    system: list[str],
    binds: list[str],
    disk_mb: int,
  ) -> None:
    """Sets the machine up; raises OSError naming what was refused.

    Args:
      counters: open files of the control groups that it is in, by "memory"
        and "pids"; an empty list where rlimits must do.
      system: directories with a pristine layer, such as "/usr".
      binds: read-only places below `/opt`.
      disk_mb: size of the verifier's own disk, as the sandbox's.
    """
    self.counters = counters
    self.statuses: dict[int, tuple[int, int]] = {}  # pid -> status, max RSS
    self.leftover_pipes: list[int] = []  # of daemons that still hold them
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      # Handled, not ignored: an exec undoes the one and keeps the other.
      signal.signal(number, lambda *_: None)
    self.wake_r, wake_w = os.pipe()
    os.set_blocking(self.wake_r, False)
    os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    kernel.loopback_up()
    socket.sethostname("sandbox")
    with contextlib.suppress(OSError):
      # No user namespaces inside: less of the kernel in reach.
      with open("/m/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    self.views = views.Views(system, binds, disk_mb)
    self.launchers = {
      "agent": launcher.Launcher(
        self.views.files["agent"], launcher.AGENT_CAPABILITIES
      )
    }

  def serve(self, channel: socket.socket, limits: dict[str, Any]) -> NoReturn:
    """Answers requests until the channel closes.

    Args:
      channel: the connected socket to the user of the sandbox.
      limits: fields of `base.Limits`, and "environment" of the commands.
    """
    self.channel, self.limits = channel, limits
    self.limit_resources()
    self.environment = {**limits["environment"], **_ENVIRONMENT}
    self.shell = launcher.Shell(self.environment, "/app")
    self.channel.sendall(wire.encode({"ready": True}))
    operations = {
      "exec": self.exec,
      "upload": self.upload,
      "download": self.download,
      "kill": self.kill_all,
      "seal": self.seal,
      "configure": self.configure,
      "open_verifier": self.open_verifier,
      "close_verifier": self.close_verifier,
    }
    while True:
      self.wait(None)
      try:
        request, blob = wire.receive(self.channel)
      except (EOFError, ConnectionResetError):
        os._exit(0)
      operation = operations.get(request["op"])
      try:
        if operation is None:  # an interrupt that came too late
          continue
        reply, data = operation(request, blob)
      except Exception as error:  # a request may fail, init may not
        text = str(error) if isinstance(error, OSError) else repr(error)
        text = text.encode("utf-8", "replace").decode()
        code = getattr(error, "errno", None)
        reply, data = {"error": text, "code": code}, b""
      self.channel.sendall(wire.encode(reply, data))

  def wait(
    self, pipe: int | None, deadline: float | None = None
  ) -> tuple[bool, bool]:
    """Sleeps until there is something to do, reaping meanwhile.

    Args:
      pipe: a command's output to wait for too, or None.
      deadline: on `time.monotonic()`, or None.

    Returns:
      (the channel has data, the pipe has data); both False when a child
      ended, or at the deadline.
    """
    while True:
      poll = select.poll()
      poll.register(self.channel, select.POLLIN)
      poll.register(self.wake_r, select.POLLIN)
      for fd in [*self.leftover_pipes, *([] if pipe is None else [pipe])]:
        poll.register(fd, select.POLLIN)
      left = None
      if deadline is not None:
        left = max(0.0, deadline - time.monotonic()) * 1000
      ready = {fd for fd, _ in poll.poll(left)}
      for fd in ready & set(self.leftover_pipes):
        if not os.read(fd, 1 << 16):
          self.leftover_pipes.remove(fd)
          os.close(fd)
      if self.wake_r in ready:
        with contextlib.suppress(BlockingIOError):
          os.read(self.wake_r, 4096)
        self.reap()
      request, data = self.channel.fileno() in ready, pipe in ready
      if request or pipe is not None or deadline is not None:
        return request, data

  def reap(self) -> None:
    """Collects every child that has ended; orphans are ours as well."""
    while True:
      try:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
      except ChildProcessError:
        return
      if pid == 0:
        return
      self.statuses[pid] = (os.waitstatus_to_exitcode(status), usage.ru_maxrss)

  def processes(self) -> dict[int, tuple[int, int]]:
    """pid -> (parent's pid, start time), of all living ones but init."""
    found = {}
    for name in os.listdir("/m/proc"):
      if name.isdigit() and name != "1":
        with contextlib.suppress(OSError):
          with open(f"/m/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
          if fields[0] not in (b"Z", b"X"):
            found[int(name)] = int(fields[1]), int(fields[19])
    return found

  def kill(self, before: Mapping[int, tuple[int, int]]) -> None:
    """Kills all processes but those of `before` and what they have started.

    Returns once they are gone; raises OSError if one will not die.
    """
    give_up = time.monotonic() + 20
    number = signal.SIGSTOP if before else signal.SIGKILL
    while True:
      self.reap()
      living = self.processes()
      # A number may have been given to another process since.
      spared = {
        pid for pid, (_, start) in living.items()
        if pid in before and before[pid][1] == start
      }  # fmt: skip
      doomed = [p for p in living if not _descends(p, living, spared)]
      if not doomed:
        return
      if time.monotonic() > give_up:
        raise OSError(errno.EBUSY, f"processes {doomed[:5]} cannot be killed")
      if not before:
        # One call for all: no fork can slip through.
        with contextlib.suppress(ProcessLookupError):
          os.kill(-1, signal.SIGKILL)
        time.sleep(0.0005)
        continue
      # Stop them all before the first dies, or a dying one's child is missed.
      for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, number)
      number = signal.SIGKILL
      time.sleep(0.0005)

  def exec(
    self, request: dict[str, Any], command: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs one command to its end, its deadline, or an interrupt."""
    view, starter = request["view"], self.launchers[request["view"]]
    before = self.processes()
    killed, refused = self.counter("memory"), self.counter("pids")
    reader, writer = os.pipe()
    state = os.memfd_create("state")
    started = time.monotonic()
    try:
      if view == "agent":
        restore = self.shell.restore + b"\n" + os.fsencode(request["prelude"])
        command = command.replace(b"\0", b"")  # no shell can take one
        pid = starter.spawn(self.shell, restore, command, writer, state)
      else:
        pid = starter.spawn_program(
          request["argv"], request["env"], request["cwd"], writer
        )
    except OSError as error:
      for fd in (reader, writer, state):
        os.close(fd)
      return _not_started(error)
    with contextlib.suppress(OSError):
      with open(f"/m/proc/{pid}/oom_score_adj", "w") as file:
        file.write("500")  # rather this than init
    os.close(writer)
    os.set_blocking(reader, False)
    output = Output(request["output_bytes"])
    outcome = self.follow(pid, reader, output, started + request["timeout"])
    if outcome != "ok":
      self.kill(before)
      while pid not in self.statuses:  # dead, perhaps not yet reaped
        self.reap()
        time.sleep(0.0005)
    drained = output.drain(reader)
    seconds = time.monotonic() - started
    if drained:
      os.close(reader)
    else:  # a daemon has it: keep reading, or its next write would kill it
      self.leftover_pipes.append(reader)
      if len(self.leftover_pipes) > 64:
        os.close(self.leftover_pipes.pop(0))
    code, peak_kib = self.statuses.pop(pid)
    self.statuses.clear()
    if view == "agent" and os.fstat(state).st_size <= _MAX_STATE:
      self.shell.save(os.pread(state, _MAX_STATE, 0))
    os.close(state)
    kept, dropped = output.result()
    if outcome == "ok":
      outcome = self.blame(code, kept, peak_kib, killed, refused)
    reply = {
      "exit_code": 128 - code if code < 0 else code,
      "dropped": dropped,
      "seconds": seconds,
      "outcome": outcome,
    }
    return reply, kept

  def limit_resources(self) -> None:
    """Sets rlimits, which every command inherits."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not self.counters["memory"]:
      size = self.limits["memory_mb"] << 20
      resource.setrlimit(resource.RLIMIT_DATA, (size, size))
      # What is shared belongs to no process.
      for name, most in (("shmall", size // 4096), ("msgmni", 64)):
        with contextlib.suppress(OSError):
          with open(f"/m/proc/sys/kernel/{name}", "w") as file:
            file.write(str(most))
    if not self.counters["pids"]:
      count = self.limits["processes"] + 1  # init is of the same user
      resource.setrlimit(resource.RLIMIT_NPROC, (count, count))

  def follow(
    self, pid: int, reader: int, output: Output, deadline: float
  ) -> str:
    """Reads until the process (not its output) ends; says why it stopped."""
    pipe: int | None = reader
    self.reap()
    while pid not in self.statuses:
      if time.monotonic() >= deadline:
        return "timeout"
      request, data = self.wait(pipe, deadline)
      if request:
        try:  # the only request that may come now is an interrupt
          wire.receive(self.channel)
        except (EOFError, ConnectionResetError):
          os._exit(0)
        return "interrupted"
      if data:
        chunk = os.read(reader, 1 << 16)
        if chunk:
          output.add(chunk)
        else:
          pipe = None
    return "ok"

  def counter(self, kind: str) -> int:
    """How often the kernel enforced the memory or process limit."""
    key = b"oom_kill" if kind == "memory" else b"max"
    for fd in self.counters[kind]:
      for line in os.pread(fd, 4096, 0).splitlines():
        name, _, value = line.partition(b" ")
        if name == key:
          return int(value)
    return 0

  def blame(
    self, code: int, output: bytes, peak_kib: int, killed: int, refused: int
  ) -> str:
    """Names the limit, if any, that a command ran into."""
    if self.counter("memory") > killed:
      return "memory"
    if self.counter("pids") > refused:
      return "processes"
    if code and not self.counters["memory"]:
      starved = (b"MemoryError", b"Cannot allocate memory", b"exhausted")
      near = peak_kib * 1024 > 0.8 * (self.limits["memory_mb"] << 20)
      if near or any(word in output for word in starved):
        return "memory"
    limited = b"Resource temporarily unavailable" in output
    if code and limited and not self.counters["pids"]:
      return "processes"
    disk = os.statvfs("/")
    if disk.f_bavail * disk.f_frsize < 1 << 16 or disk.f_ffree < 16:
      return "disk"
    return "ok"

  def upload(
    self, request: dict[str, Any], blob: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Writes files; relative paths start at the working directory."""
    offset = 0
    with self.views.inside(request["view"]):
      for path, mode, size in request["files"]:
        path = os.path.join(request["cwd"], path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
          if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)  # a link or a pipe is replaced, not followed
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = os.open(path, flags, mode)
        try:
          part = memoryview(blob)[offset : offset + size]
          while part:
            part = part[os.write(fd, part) :]
          os.fchmod(fd, mode)
        finally:
          os.close(fd)
        offset += size
    return {}, b""

  def download(
    self, request: dict[str, Any], blob: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Reads one regular file of at most `max_bytes`."""
    path = request["path"]
    with self.views.inside(request["view"]):
      fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
      try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
          raise OSError(errno.EINVAL, f"{path} is not a regular file")
        if found.st_size > request["max_bytes"]:
          raise OSError(
            errno.EFBIG,
            f"{path} has {found.st_size} bytes, more than the "
            f"{request['max_bytes']} asked for",
          )
        parts = []
        while part := os.read(fd, 1 << 20):
          parts.append(part)
        return {}, b"".join(parts)[: request["max_bytes"]]
      finally:
        os.close(fd)

  def kill_all(
    self, request: dict[str, Any], blob: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Ends every process but init; returns how many there were."""
    count = len(self.processes())
    self.kill({})
    for fd in self.leftover_pipes:
      os.close(fd)
    self.leftover_pipes.clear()
    return {"killed": count}, b""

  def configure(
    self, request: dict[str, Any], blob: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """A new shell for the agent: where it starts, what its variables add."""
    with self.views.inside("agent"):
      os.makedirs(request["cwd"], exist_ok=True)
    env = {**self.environment, **request["env"]}
    self.shell = launcher.Shell(env, request["cwd"])
    return {}, b""

  def seal(
    self, request: dict[str, Any], blob: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Ends set-up: no process stays, system directories are now pristine."""
    self.kill_all(request, blob)
    self.views.seal()
    return {}, b""

  def open_verifier(
    self, request: dict[str, Any], blob: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Makes the verifier's view, after the agent's processes are gone."""
    killed = 0
    if not request["keep_processes"]:
      killed = self.kill_all(request, blob)[0]["killed"]
      kernel.remove_ipc("/m/proc")
    self.close_verifier(request, blob)
    self.views.open_verifier(request["keep_system"])
    self.launchers["verifier"] = launcher.Launcher(
      self.views.files["verifier"], launcher.VERIFIER_CAPABILITIES
    )
    return {"killed": killed}, b""

  def close_verifier(
    self, request: dict[str, Any], blob: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Drops the verifier's view with all that was written in it."""
    if "verifier" in self.launchers:
      self.launchers.pop("verifier").close()
    self.views.close_verifier()
    return {}, b""


def _descends(
  pid: int, living: Mapping[int, tuple[int, int]], from_any: set[int]
) -> bool:
  """Whether `pid` or an ancestor is in `from_any`."""
  seen = set()
  while pid in living and pid not in seen:
    if pid in from_any:
      return True
    seen.add(pid)
    pid = living[pid][0]
  return False


def _not_started(error: OSError) -> tuple[dict[str, Any], bytes]:
  """The reply when a command cannot start: a limit, or no shell any more."""
  limits = {errno.EAGAIN: "processes", errno.ENOMEM: "memory"}
  reply = {
    "exit_code": 254 if error.errno in limits else 127,
    "dropped": 0,
    "seconds": 0.0,
    "outcome": limits.get(error.errno, "ok"),
  }
  return reply, os.fsencode(f"cannot start: {error.strerror}\n")
