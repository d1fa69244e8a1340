"""What a sandbox is: limits, results, errors, and the protocol.

A sandbox is a private machine for one episode. Anything that can `start`,
`exec`, `upload`, `download` and `close` can serve as one; `local.py` builds it
from namespaces. Nothing here starts a process or imports JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

# A file to upload: its bytes, or its bytes and its mode (0o644 otherwise).
FileSpec = bytes | tuple[bytes, int]

OUTCOMES = (
  "ok",  # the command ended by itself, whatever its exit code
  "timeout",  # killed, with all that it started, at its own deadline
  "memory",  # the kernel killed a process for the memory limit
  "processes",  # a fork was refused for the process limit
  "disk",  # it ended with the sandbox's disk full
  "interrupted",  # the caller gave up waiting
)


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one sandbox may use.

  Attributes:
    memory_mb: memory of all its processes together, MiB (files are counted
      by `disk_mb`).
    processes: processes and threads alive at once.
    disk_mb: everything it writes, MiB; held in memory only as it is written.
    output_bytes: bytes of a command's output that are kept; half from the
      head, half from the tail.
  """

  memory_mb: int = 512
  processes: int = 64
  disk_mb: int = 256
  output_bytes: int = 10_000

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(
          f"Limits.{field.name} = {value!r}: expected a whole number >= 1"
        )


@dataclasses.dataclass(frozen=True)
class ExecResult:
  """How one command ended.

  Attributes:
    exit_code: the shell's exit code; 128 + signal when a signal ended it.
    output: stdout and stderr as they came, as bytes (any encoding). When
      longer than the cap, head and tail with a line between that says how
      much was left out.
    dropped_bytes: how many bytes that line stands for.
    seconds: wall time inside the sandbox.
    timed_out: whether the command's own deadline ended it.
    timeout_sec: that deadline.
    outcome: one of `OUTCOMES`.
  """

  exit_code: int
  output: bytes
  dropped_bytes: int
  seconds: float
  timed_out: bool
  timeout_sec: float
  outcome: str = "ok"

  @property
  def text(self) -> str:
    """The output as text; bytes that are not UTF-8 become U+FFFD."""
    return self.output.decode("utf-8", "replace")


class SandboxError(Exception):
  """Something about the sandbox, never about the command that ran in it."""


class SandboxUnavailable(SandboxError):
  """This machine cannot make sandboxes; says why, and what to do."""


class SandboxDied(SandboxError):
  """The sandbox is gone although nobody closed it: an infra fault."""


class DiskFull(SandboxError):
  """No space left: in the sandbox, or in the host's run directory."""


class Sandbox(Protocol):
  """One private machine; commands run one after the other."""

  async def start(self) -> None:
    """Boots it. Raises `SandboxUnavailable` or `SandboxError`."""

  async def exec(
    self,
    command: str | bytes | Sequence[str],
    *,
    timeout_sec: float = 10.0,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
  ) -> ExecResult:
    """Runs a shell command (or one program, given as a sequence).

    Working directory, exported variables and functions carry over to the
    next call; `cwd` and `env` act like a `cd` and an `export` before it.
    Raises `SandboxDied` when the sandbox is gone.
    """

  async def upload(self, files: Mapping[str, FileSpec]) -> None:
    """Writes files (absolute path -> content), making their directories."""

  async def download(self, path: str, max_bytes: int = 1 << 20) -> bytes:
    """Reads one regular file. Raises `SandboxError` when it cannot."""

  async def close(self) -> None:
    """Ends all of it. Calling it twice is fine."""
