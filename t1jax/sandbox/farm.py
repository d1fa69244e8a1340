"""Many sandboxes at once, from one small helper process.

The program that uses a farm may hold gigabytes and hundreds of threads; it
never forks. It starts `zygote.py` on a bare interpreter, which forks the
sandboxes and dies with it. A farm that was killed leaves nothing but a small
directory and empty control groups; the next farm to start removes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from t1jax.sandbox import base, cgroups, local, stage, template, zygote

_START_SEC = 60.0


def run_directory() -> str:
  """Where farms of this user keep their small files.

  `T1JAX_RUN_DIR`, or a directory of this user's in the temporary directory.
  """
  default = os.path.join(tempfile.gettempdir(), f"t1jax-{os.getuid()}")
  return os.environ.get("T1JAX_RUN_DIR", default)


class Farm:
  """An async context manager that hands out sandboxes.

  Attributes:
    root: whether sandboxes were made with root's means (after entering).
    controllers: control group controllers in force; rlimits stand in for
      those of "memory" and "pids" that are missing.
  """

  def __init__(
    self,
    *,
    max_sandboxes: int = 64,
    binds: Mapping[str, str] | None = None,
  ) -> None:
    """Only stores its arguments.

    Args:
      max_sandboxes: how many may be alive; `sandbox()` waits for its turn.
      binds: {path inside: host path} shown read-only in every sandbox, below
        `/opt`.
    """
    if max_sandboxes < 1:
      raise ValueError(f"max_sandboxes = {max_sandboxes}: expected >= 1")
    self.max_sandboxes = max_sandboxes
    self.binds = {**template.python_bind(), **(binds or {})}
    for target, source in self.binds.items():
      if not target.startswith("/opt/") or not os.path.exists(source):
        raise ValueError(
          f"binds: {target} -> {source}: expected a path below /opt and an "
          "existing file or directory of the host"
        )
    self.root = False
    self.controllers: tuple[str, ...] = ()
    self.directory: str | None = None
    self._process: subprocess.Popen[bytes] | None = None
    self._control: socket.socket | None = None
    self._ready: asyncio.Future[dict[str, Any]] | None = None
    self._turns = asyncio.Semaphore(max_sandboxes)
    self._gone: dict[int, asyncio.Future[int]] = {}
    self._next = 0
    self._starting = asyncio.Lock()
    self._open = False

  async def __aenter__(self) -> Self:
    """Sweeps what dead farms left, then starts the zygote.

    Raises:
      SandboxUnavailable: the kernel says no; why, and what to do.
      DiskFull: no space for the farm's few files.
    """
    sweep()
    self._open = True
    try:
      await self._start_zygote()
    except BaseException:
      await self.close()
      raise
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  @contextlib.asynccontextmanager
  async def sandbox(
    self, limits: base.Limits | None = None
  ) -> AsyncIterator[local.LocalSandbox]:
    """A booted sandbox, closed on the way out."""
    async with self._turns:
      sandbox = local.LocalSandbox(self, limits or base.Limits())
      try:
        await sandbox.start()
        yield sandbox
      finally:
        await sandbox.close()

  async def close(self) -> None:
    """Ends every sandbox, the zygote, and the farm's files."""
    self._open = False
    if self._control is not None:
      asyncio.get_running_loop().remove_reader(self._control)
      self._control.close()
      self._control = None
    process, self._process = self._process, None
    directory, self.directory = self.directory, None
    try:
      if process is not None:
        await asyncio.to_thread(process.wait, 30)
    except subprocess.TimeoutExpired:
      pass
    finally:  # also when nobody has the time to wait
      if process is not None and process.poll() is None:
        process.kill()
        process.wait()
      self._all_gone()
      if directory is not None:
        _remove_farm(os.path.basename(directory), directory)

  async def boot(
    self, channel: socket.socket, settings: Mapping[str, int | str]
  ) -> tuple[int, asyncio.Future[int]]:
    """Asks the zygote for one sandbox on `channel` (see `LocalSandbox`).

    Args:
      channel: the sandbox's end of a connected socket.
      settings: the fields of `base.Limits`, and the commands' "environment".

    Returns:
      its number, and a future that is done when its processes are gone.
    """
    async with self._starting:
      if not self._open:
        raise base.SandboxError("the farm is closed: enter it first")
      if self._control is None:
        await self._start_zygote()  # it was killed; live on
    assert self._control is not None
    number, self._next = self._next, self._next + 1
    gone = asyncio.get_running_loop().create_future()
    self._gone[number] = gone
    request = {"id": number, "limits": dict(settings)}
    while True:
      try:
        socket.send_fds(
          self._control, [json.dumps(request).encode()], [channel.fileno()]
        )
        return number, gone
      except BlockingIOError:
        await asyncio.sleep(0.001)
      except OSError as error:
        self._gone.pop(number, None)
        raise base.SandboxDied(f"the farm's zygote is gone: {error}") from error
      except asyncio.CancelledError:
        self._gone.pop(number, None)
        raise

  def kill(self, number: int) -> None:
    """Ends a sandbox whose init does not leave by itself."""
    if self._control is None or number not in self._gone:
      return
    try:
      self._control.send(json.dumps({"kill": number}).encode())
    except BlockingIOError:
      asyncio.get_running_loop().call_later(0.1, self.kill, number)
    except OSError:
      return  # the zygote is gone, and so are its sandboxes

  async def _start_zygote(self) -> None:
    loop = asyncio.get_running_loop()
    if self.directory is None:
      self.directory = _make_directory(self.binds)
    elif self._process is not None:
      # A successor: its sandboxes are numbered from 0 again.
      await asyncio.to_thread(self._process.wait)
      await asyncio.to_thread(cgroups.sweep, os.path.basename(self.directory))
    config = {
      "run_dir": self.directory,
      "owner": os.path.basename(self.directory),
      "system": template.system_directories(),
      "binds": self.binds,
      "spares": min(2, self.max_sandboxes),
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
      self._process = subprocess.Popen(
        [sys.executable, "-I", "-S", zygote.__file__, str(theirs.fileno()),
         json.dumps(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={"PATH": os.defpath},
        cwd="/",
      )  # fmt: skip
    _write_pid(self.directory, self._process.pid)
    self._control = ours
    self._ready = loop.create_future()
    loop.add_reader(ours, self._events)
    try:
      async with asyncio.timeout(_START_SEC):
        event = await asyncio.shield(self._ready)
    except TimeoutError:
      self._process.kill()
      raise base.SandboxUnavailable(
        f"the farm's zygote did not start within {_START_SEC:.0f} s"
      ) from None
    if event["event"] == "fatal":
      raise base.SandboxUnavailable(explain(event["error"], event["code"]))

  def _events(self) -> None:
    """Reads what the zygote reports."""
    assert self._control is not None
    while True:
      try:
        message = self._control.recv(1 << 16)
      except BlockingIOError:
        return
      except OSError:
        message = b""
      if not message:
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._control = None
        self._all_gone()
        return
      event = json.loads(message)
      if event["event"] == "gone":
        gone = self._gone.pop(event["id"], None)
        if gone is not None and not gone.done():
          gone.set_result(event["status"])
      elif self._ready is not None and not self._ready.done():
        self.root = event.get("root", False)
        self.controllers = tuple(event.get("controllers", ()))
        self._ready.set_result(event)

  def _all_gone(self) -> None:
    for gone in self._gone.values():
      if not gone.done():
        gone.set_result(-1)
    self._gone.clear()
    if self._ready is not None and not self._ready.done():
      self._ready.set_result({
        "event": "fatal", "code": None,
        "error": "the farm's zygote ended before it was ready",
      })  # fmt: skip


async def probe() -> None:
  """Boots one sandbox and runs `true`.

  Raises:
    SandboxUnavailable: with one line that says why, and what to do.
  """
  async with Farm(max_sandboxes=1) as farm:
    try:
      async with farm.sandbox() as sandbox:
        result = await sandbox.exec("true", timeout_sec=30.0)
    except base.SandboxUnavailable:
      raise
    except base.SandboxError as error:
      raise base.SandboxUnavailable(explain(str(error), None)) from error
  if result.exit_code != 0:
    raise base.SandboxUnavailable(
      f"a sandbox boots but cannot run `true`: {result.text.strip()!r}"
    )


def explain(error: str, code: int | None) -> str:
  """One line: what the kernel refused, the likely setting, the fix."""
  if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
    why = (
      "AppArmor keeps ordinary users from making user namespaces (Ubuntu "
      "23.10 and later); run as root, or: sudo sysctl -w "
      "kernel.apparmor_restrict_unprivileged_userns=0"
    )
  elif _setting("kernel/unprivileged_userns_clone") == "0":
    why = (
      "ordinary users may not make user namespaces; run as root, or: sudo "
      "sysctl -w kernel.unprivileged_userns_clone=1"
    )
  elif _setting("user/max_user_namespaces") == "0":
    why = (
      "user namespaces are off; run: sudo sysctl -w "
      "user.max_user_namespaces=10000"
    )
  elif code == errno.ENOSPC:
    why = (
      "the limit on namespaces is reached or is 0; see "
      "/proc/sys/user/max_*_namespaces"
    )
  elif code in (errno.EPERM, errno.EACCES):
    why = (
      "a container or a seccomp filter forbids it; give the container "
      "CAP_SYS_ADMIN and an unconfined seccomp profile (docker run "
      "--privileged), or run on the host"
    )
  else:
    why = (
      "the kernel lacks something; Linux 5.11 or later with user namespaces "
      "and overlayfs is needed"
    )
  return f"this machine cannot make sandboxes: {error}. {why}."


def _setting(path: str) -> str | None:
  """A value below /proc/sys; None where this kernel has none."""
  with contextlib.suppress(OSError), open(f"/proc/sys/{path}") as file:
    return file.read().strip()
  return None


def _start_time(pid: int) -> str | None:
  """When a process started, in clock ticks; None when it is not there."""
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      fields = file.read().rpartition(b")")[2].split()
  except OSError:
    return None
  return None if fields[0] == b"Z" else fields[19].decode()


def _make_directory(binds: Mapping[str, str]) -> str:
  """Makes the farm's directory: "<pid>-<start time>.<n>" with a template."""
  parent = run_directory()
  try:
    os.makedirs(parent, mode=0o755, exist_ok=True)
    if os.stat(parent).st_uid != os.geteuid():
      raise PermissionError(errno.EACCES, "it belongs to another user")
    owner = f"{os.getpid()}-{_start_time(os.getpid())}"
    for index in range(1000):
      path = os.path.join(parent, f"{owner}-{index}")
      with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        break
    os.mkdir(f"{path}/stage")
    first_id = stage.FIRST_ID if stage.has_all_ids() else None
    template.build(f"{path}/template", dict(binds), first_id)
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      raise base.DiskFull(
        f"the disk of the sandboxes' run directory {parent} is full; free "
        "some space there, or set T1JAX_RUN_DIR to another directory"
      ) from error
    raise base.SandboxUnavailable(
      f"cannot prepare the run directory {parent}: {error}; set "
      "T1JAX_RUN_DIR to a directory of your own"
    ) from error
  return path


def _write_pid(directory: str, pid: int) -> None:
  with open(f"{directory}/zygote", "w") as file:
    file.write(f"{pid} {_start_time(pid)}")


def sweep() -> list[str]:
  """Removes what farms of dead processes left.

  Returns:
    the names ("<pid>-<start time>-<n>") of the farms swept.
  """
  parent = run_directory()
  names = set(cgroups.owners())
  with contextlib.suppress(OSError):
    names.update(os.listdir(parent))
  swept = []
  for name in sorted(names):
    pid, _, rest = name.partition("-")
    if not pid.isdigit() or not rest:
      continue
    if _start_time(int(pid)) == rest.split("-")[0]:
      continue  # alive
    _remove_farm(name, os.path.join(parent, name))
    swept.append(name)
  return swept


def _remove_farm(name: str, directory: str) -> None:
  """Kills a farm's zygote if it is there, removes its groups and files."""
  with contextlib.suppress(OSError, ValueError):
    with open(f"{directory}/zygote") as file:
      pid, started = file.read().split()
    if _start_time(int(pid)) == started:
      os.kill(int(pid), signal.SIGKILL)
  cgroups.sweep(name)
  shutil.rmtree(directory, ignore_errors=True)
