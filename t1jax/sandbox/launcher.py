"""How an init starts commands: a thread per view, and no fork.

A thread can hold a mount namespace, a working directory and a capability
bounding set of its own; what it spawns inherits them. Spawning shares memory
until the exec, which costs a fraction of a fork where page tables are slow
(virtual machines) and leaves init's own rights as they are.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import threading

from t1jax.sandbox import kernel, seccomp

# What a container's root is usually given: change owners, modes and users,
# bind low ports, chroot. Not: mount, trace, set the clock, configure devices.
AGENT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 31})
# One more (AUDIT_CONTROL, idle in a user namespace): a process can only be
# traced by one that has at least its capabilities, so whatever the agent left
# running cannot trace the tests.
VERIFIER_CAPABILITIES = AGENT_CAPABILITIES | {30}

_STATE_FD, _RESTORE_FD, _COMMAND_FD = 62, 61, 60
# Bash reads this before the command: it restores the state and asks for it to
# be saved at the end. The command itself is the argument of a plain `bash -c`,
# so messages, line numbers and `ps` look as they do anywhere else.
_SAVE = rb"""
builtin unset BASH_ENV
builtin trap '{ builtin set +xv; builtin pwd; builtin printf "\0"
builtin declare -px; builtin declare -f; builtin declare -xF
builtin printf "\0"; } >&62 2>/dev/null' EXIT
"""
_FROM_FILE = b'eval "$(</proc/self/fd/60)"'
_LARGE_ARGUMENT = 100_000  # the kernel refuses one argument of 128 KiB


class Shell:
  """What carries over from one command of a view to its next."""

  def __init__(self, env: dict[str, str], cwd: str) -> None:
    self.env = env
    self.cwd = cwd
    self.restore = b""  # bash text: exported variables and functions

  def save(self, dump: bytes) -> None:
    """Takes what the trap wrote; a torn or huge dump changes nothing."""
    if dump.endswith(b"\0") and dump.count(b"\0") == 2:
      cwd, self.restore, _ = dump.split(b"\0")
      self.cwd = os.fsdecode(cwd.removesuffix(b"\n")) or "/"
      self.env = {}


class Launcher:
  """Starts the commands of one view."""

  def __init__(self, namespace: int, capabilities: frozenset[int]) -> None:
    """Starts the thread; raises OSError if it may not enter.

    Args:
      namespace: open file of the view's mount namespace.
      capabilities: all that its commands may ever have.
    """
    self._todo: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
    self._done: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
    self._thread = threading.Thread(
      target=self._run, args=(namespace, capabilities), daemon=True
    )
    try:
      self._thread.start()
    except RuntimeError as error:  # it is a process to the kernel's limits
      raise BlockingIOError(errno.EAGAIN, str(error)) from error
    self._result()

  def spawn(
    self, shell: Shell, restore: bytes, command: bytes, output: int, state: int
  ) -> int:
    """Starts bash on `command`; raises BlockingIOError at the process limit.

    Args:
      shell: where it starts and with which variables.
      restore: bash text run before the command.
      command: bash text.
      output: open file for its stdout and stderr.
      state: open file that takes the shell's state at the end.

    Returns:
      its process id; it leads a session of its own.
    """
    self._todo.put((shell, restore, command, output, state))
    return self._result()

  def spawn_program(
    self, argv: list[str], env: dict[str, str], cwd: str, output: int
  ) -> int:
    """Starts a program by its absolute path; otherwise like `spawn`."""
    self._todo.put((Shell(env, cwd), argv, None, output, -1))
    return self._result()

  def close(self) -> None:
    """Ends the thread, which lets go of the view."""
    self._todo.put(None)
    self._thread.join()

  def _result(self) -> int:
    result = self._done.get()
    if isinstance(result, OSError):
      raise result
    return result

  def _run(self, namespace: int, capabilities: frozenset[int]) -> None:
    try:
      # A view can only be entered with a root directory shared with no one.
      kernel.unshare(kernel.CLONE_FS, "fs")
      kernel.setns(namespace, kernel.CLONE_NEWNS)
      kernel.keep_capabilities(capabilities)
      seccomp.confine()
      null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
      self._done.put(error)
      return
    self._done.put(0)
    while (work := self._todo.get()) is not None:
      try:
        self._done.put(self._spawn(null, *work))
      except OSError as error:
        self._done.put(error)
      except Exception as error:  # such as a NUL in a variable: say so
        self._done.put(OSError(errno.EINVAL, repr(error)[:200]))
    os.close(null)

  def _spawn(
    self,
    null: int,
    shell: Shell,
    before: bytes | list[str],
    command: bytes | None,
    output: int,
    state: int,
  ) -> int:
    try:
      os.chdir(shell.cwd)
    except OSError as error:
      os.chdir("/")
      # Cut: nobody reads the pipe yet, and it must hold all of it.
      says = os.fsencode(f"bash: {shell.cwd[:4096]}: {error.strerror}\n")
      os.write(output, says)
    moves = [(null, 0), (output, 1), (output, 2)]
    if command is None:
      return _posix_spawn(before, shell.env, moves)
    files = [memory_file(before + _SAVE)]
    if len(command) > _LARGE_ARGUMENT:
      files.append(memory_file(command))
      command = _FROM_FILE
    moves += [(state, _STATE_FD), *zip(files, (_RESTORE_FD, _COMMAND_FD))]
    env = {**shell.env, "BASH_ENV": f"/proc/self/fd/{_RESTORE_FD}"}
    try:
      return _posix_spawn(["/bin/bash", "-c", "--", command], env, moves)
    finally:
      for fd in files:
        os.close(fd)


def _posix_spawn(
  argv: list[str | bytes], env: dict[str, str], moves: list[tuple[int, int]]
) -> int:
  return os.posix_spawn(
    argv[0],
    [os.path.basename(argv[0]), *argv[1:]],
    env,
    file_actions=[(os.POSIX_SPAWN_DUP2, *move) for move in moves],
    setsid=True,
    setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
  )


def memory_file(content: bytes) -> int:
  """A file in memory that holds `content`, open at its start."""
  fd = os.memfd_create("text")
  view = memoryview(content)
  while view:
    view = view[os.write(fd, view) :]
  os.lseek(fd, 0, os.SEEK_SET)
  return fd
