"""A sandbox on this machine: the client's end of an init's channel."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import shlex
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t1jax.sandbox import base, template, wire

if TYPE_CHECKING:
  from t1jax.sandbox import farm as farm_lib

# Beyond a command's own deadline: killing what it started, and a busy host.
_GRACE_SEC = 30.0
_BOOT_SEC = 60.0
# An init leaves when its channel closes; one that is stuck is killed.
_LEAVE_SEC = 5.0
# Nothing takes an init so long to die, on however busy a machine.
_GIVE_UP_SEC = 120.0


class LocalSandbox:
  """One sandbox of a `Farm`; satisfies `base.Sandbox`.

  `verifier_view` and what follows are for `rewards/verifier.py`: the same
  sandbox with pristine system directories (see `views.py`).
  """

  def __init__(self, farm: farm_lib.Farm, limits: base.Limits) -> None:
    self.limits = limits
    self.number = -1
    self.workdir = "/app"
    self.default_path = template.search_path(farm.binds)
    self.env: dict[str, str] = {}
    self._loader = template.loader_settings(farm.binds)
    self._farm = farm
    self._lock = asyncio.Lock()
    self._reader: asyncio.StreamReader | None = None
    self._writer: asyncio.StreamWriter | None = None
    self._gone: asyncio.Future[int] | None = None
    self._closed = False

  def untouched(self) -> LocalSandbox:
    """Another sandbox with the same limits, not yet started."""
    return LocalSandbox(self._farm, self.limits)

  async def start(self) -> None:
    """Boots it; raises `SandboxError` naming the call that was refused."""
    settings = {
      **dataclasses.asdict(self.limits),
      "environment": {"PATH": self.default_path, **self._loader},
    }
    ours, theirs = socket.socketpair()
    with theirs:
      try:
        self.number, self._gone = await self._farm.boot(theirs, settings)
      except BaseException:
        ours.close()
        raise
    try:
      self._reader, self._writer = await asyncio.open_connection(
        sock=ours, limit=1 << 20
      )
      async with asyncio.timeout(_BOOT_SEC):
        reply, _ = await self._receive()
    except BaseException as error:
      ours.close()
      await self.close()
      if isinstance(error, TimeoutError):
        raise base.SandboxError(
          f"sandbox {self.number}: not up after {_BOOT_SEC:.0f} s"
        ) from None
      raise
    if "error" in reply:
      await self.close()
      raise base.SandboxError(
        f"sandbox {self.number} did not boot: {reply['error']}"
      )

  async def exec(
    self,
    command: str | bytes | Sequence[str],
    *,
    timeout_sec: float = 10.0,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
  ) -> base.ExecResult:
    """Runs a command as the agent; see `base.Sandbox.exec`."""
    lines = [f"export {k}={shlex.quote(v)}" for k, v in (env or {}).items()]
    if cwd is not None:
      lines.append(f"cd -- {shlex.quote(cwd)}")
    return await self._exec(
      command, timeout_sec, {"view": "agent", "prelude": "\n".join(lines)}
    )

  async def exec_verifier(
    self,
    argv: Sequence[str],
    *,
    timeout_sec: float,
    cwd: str,
    env: Mapping[str, str],
    output_bytes: int,
  ) -> base.ExecResult:
    """Runs a program in the verifier's view, in exactly this environment.

    (And with the loader's path, where the sandbox's Python needs one.)
    """
    extra = {
      "view": "verifier", "argv": list(argv), "cwd": cwd,
      "env": {**self._loader, **env}, "output_bytes": output_bytes,
    }  # fmt: skip
    return await self._exec(b"", timeout_sec, extra)

  async def _exec(
    self,
    command: str | bytes | Sequence[str],
    timeout_sec: float,
    extra: dict[str, Any],
  ) -> base.ExecResult:
    if not isinstance(command, str | bytes):
      command = shlex.join(command)
    if isinstance(command, str):
      try:
        command = command.encode("utf-8", "surrogateescape")
      except UnicodeEncodeError:  # half a pair, which stands for no byte
        command = command.encode("utf-8", "replace")
    request = {
      "op": "exec",
      "timeout": timeout_sec,
      "output_bytes": self.limits.output_bytes,
      **extra,
    }
    reply, output = await self._call(
      request, command, timeout_sec + _GRACE_SEC, interruptible=True
    )
    return base.ExecResult(
      exit_code=reply["exit_code"],
      output=output,
      dropped_bytes=reply["dropped"],
      seconds=reply["seconds"],
      timed_out=reply["outcome"] == "timeout",
      timeout_sec=timeout_sec,
      outcome=reply["outcome"],
    )

  async def upload(
    self, files: Mapping[str, base.FileSpec], *, view: str = "agent"
  ) -> None:
    """Writes files; `DiskFull` when they do not fit in `disk_mb`."""
    entries, parts = [], []
    for path, spec in files.items():
      content, mode = spec if isinstance(spec, tuple) else (spec, 0o644)
      entries.append((path, mode, len(content)))
      parts.append(content)
    request = {
      "op": "upload", "view": view, "files": entries, "cwd": self.workdir,
    }  # fmt: skip
    await self._call(request, b"".join(parts))

  async def download(
    self, path: str, max_bytes: int = 1 << 20, *, view: str = "agent"
  ) -> bytes:
    """Reads one regular file of at most `max_bytes`."""
    request = {
      "op": "download", "view": view, "path": path, "max_bytes": max_bytes,
    }  # fmt: skip
    return (await self._call(request))[1]

  async def configure(self, workdir: str, env: Mapping[str, str]) -> None:
    """Sets where the agent's shell starts and what its environment adds."""
    self.workdir = workdir
    self.env.update(env)
    await self._call({"op": "configure", "cwd": workdir, "env": self.env})

  async def seal(self) -> None:
    """Ends set-up: kills its processes, makes its changes the image."""
    await self._call({"op": "seal"})

  async def kill_all(self) -> int:
    """Ends every process in the sandbox; returns how many there were."""
    return (await self._call({"op": "kill"}))[0]["killed"]

  async def open_verifier(
    self, *, keep_processes: bool = False, keep_system: bool = False
  ) -> None:
    """Kills the agent's processes and makes the verifier's view."""
    await self._call(
      {
        "op": "open_verifier",
        "keep_processes": keep_processes,
        "keep_system": keep_system,
      }
    )

  async def close_verifier(self) -> None:
    """Drops the verifier's view and all that was written in it."""
    await self._call({"op": "close_verifier"})

  async def close(self) -> None:
    """Ends the sandbox and waits until its processes are gone.

    Raises:
      SandboxError: they are not, long after they were killed.
    """
    gone = self._gone
    if not self._closed:
      self._closed = True
      if self._writer is not None:
        # Not a polite end: what is still to be sent has no reader.
        self._writer.transport.abort()
      if gone is not None:
        loop = asyncio.get_running_loop()
        late = loop.call_later(_LEAVE_SEC, self._farm.kill, self.number)
        gone.add_done_callback(lambda _: late.cancel())
    if gone is not None:
      try:
        await asyncio.wait_for(asyncio.shield(gone), _GIVE_UP_SEC)
      except TimeoutError as error:
        raise base.SandboxError(
          f"sandbox {self.number} has not ended within {_GIVE_UP_SEC:.0f} s of "
          "being killed; restart the program"
        ) from error

  async def _receive(self) -> tuple[dict[str, Any], bytes]:
    assert self._reader is not None
    try:
      header = await self._reader.readexactly(wire.HEADER.size)
      head_length, blob_length = wire.HEADER.unpack(header)
      head = await self._reader.readexactly(head_length)
      blob = await self._reader.readexactly(blob_length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
      raise self._died() from error
    return json.loads(head), blob

  async def _exchange(
    self, request: dict[str, Any], blob: bytes
  ) -> tuple[dict[str, Any], bytes]:
    assert self._writer is not None
    try:
      self._writer.write(wire.encode(request, blob))
      await self._writer.drain()
    except ConnectionError as error:
      raise self._died() from error
    return await self._receive()

  def _died(self) -> base.SandboxDied:
    return base.SandboxDied(
      f"sandbox {self.number} is gone: its init or the farm was killed; "
      "start another one"
    )

  async def _call(
    self,
    request: dict[str, Any],
    blob: bytes = b"",
    seconds: float = 120.0,
    *,
    interruptible: bool = False,
  ) -> tuple[dict[str, Any], bytes]:
    """One request and its reply; the channel stays in step if cancelled."""
    async with self._lock:
      if self._closed or self._writer is None:
        raise base.SandboxDied(f"sandbox {self.number} is not running")
      exchange = asyncio.ensure_future(self._exchange(request, blob))
      try:
        async with asyncio.timeout(seconds):
          reply, data = await asyncio.shield(exchange)
      except TimeoutError:
        await self.close()
        raise base.SandboxDied(
          f"sandbox {self.number} did not answer {request['op']!r} within "
          f"{seconds:.0f} s; it was closed"
        ) from None
      except asyncio.CancelledError:
        if interruptible and not exchange.done():
          self._writer.write(wire.encode({"op": "interrupt"}))
        # The reply must be read before anyone else may ask.
        await asyncio.wait([exchange], timeout=_GRACE_SEC)
        raise
      finally:
        if not exchange.done():  # out of step for good
          exchange.cancel()
          await self.close()
        elif not exchange.cancelled():
          exchange.exception()  # seen, even if the caller has gone
    if "error" in reply:
      where = f"sandbox {self.number}, {request['op']}"
      if reply["code"] == errno.ENOSPC:
        raise base.DiskFull(
          f"{where}: its disk of {self.limits.disk_mb} MiB is full; raise "
          "Limits.disk_mb"
        )
      raise base.SandboxError(f"{where}: {reply['error']}")
    return reply, data
