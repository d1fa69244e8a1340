"""The small process that makes sandboxes, so that the big one never forks.

Run as `python -I -S zygote.py SOCKET_FD CONFIG_JSON`. It holds a stage (see
`stage.py`) and forks one child per sandbox, which finishes the mounts, enters
its own user namespace and becomes the sandbox's init (`inside.py`).

Every death is noticed: the zygote dies with its owner, an init with the
zygote, and all processes of a sandbox with its init.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
  # -I -S leaves no path to this package: add it for the imports below only.
  _HERE = os.path.dirname(os.path.abspath(__file__))
  sys.path.insert(0, os.path.dirname(os.path.dirname(_HERE)))

import array
import contextlib
import gc
import json
import select
import signal
import socket
from typing import Any, NoReturn

from t1jax.sandbox import inside, kernel, wire
from t1jax.sandbox.stage import Stage, write_maps

# Inside a sandbox; nothing there has it.
_INIT_GROUP = 65_533


class Spare:
  """An init that has booted, or is about to, and waits for its user."""

  def __init__(
    self, number: int, pid: int, disk_mb: int, link: socket.socket
  ) -> None:
    self.number = number
    self.pid = pid
    self.disk_mb = disk_mb  # fixed when its disk was mounted
    self.link = link


class Zygote:
  """The loop: keeps spares, hands them over, maps ids, reaps, reports.

  Entering a control group waits for a grace period of the kernel (10 ms and
  more), mounts and namespaces take some too. So a spare does all that ahead,
  with the disk size asked for last; a request then only names its limits.
  """

  def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
    self.control = control
    self.owner_fd = os.pidfd_open(int(config["owner"].split("-")[0]))
    self.stage = Stage(config)
    self.num_spares = int(config["spares"])
    self.next_number = 0
    self.poll = select.poll()
    self.poll.register(control, select.POLLIN)
    self.poll.register(self.owner_fd, select.POLLIN)
    self.links: dict[int, Spare] = {}  # those whose ids are not mapped yet
    self.spares: list[Spare] = []
    self.living: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, number)
    self.requests: dict[int, int] = {}  # number -> the farm's id

  def send(self, **event: Any) -> None:
    """Reports one event to the farm."""
    try:
      self.control.send(json.dumps(event).encode())
    except (BrokenPipeError, ConnectionResetError):
      self.leave()

  def leave(self) -> NoReturn:
    """Ends all sandboxes and the zygote."""
    for pidfd in self.living:
      with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    for pid, number in self.living.values():
      os.waitpid(pid, 0)
      if self.stage.groups:
        self.stage.groups.remove(str(number))
    if self.stage.groups:
      self.stage.groups.close()
    os._exit(0)

  def run(self) -> NoReturn:
    """Serves until the farm or its process goes."""
    groups = self.stage.groups
    self.send(
      event="ready",
      root=self.stage.root,
      shifted=self.stage.shifted,
      controllers=groups.controllers() if groups else [],
    )
    while True:
      for fd, _ in self.poll.poll():
        if fd == self.owner_fd:
          self.leave()
        elif fd == self.control.fileno():
          self.serve_request()
          break  # it may have closed what the rest of the list names
        elif fd in self.links:
          self.map_ids(fd)
        elif fd in self.living:
          self.reap(fd)

  def serve_request(self) -> None:
    """Reads one request with the sandbox's socket; hands a spare over."""
    try:
      message, ancillary, _, _ = self.control.recvmsg(
        1 << 16, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
      )
    except ConnectionResetError:
      self.leave()
    if not message:
      self.leave()
    request = json.loads(message)
    if "kill" in request:
      self.kill(request["kill"])
      return
    fds = array.array("i")
    for _, _, data in ancillary:
      fds.frombytes(data)
    with socket.socket(fileno=fds[0]) as channel:
      try:
        self.hand_over(request["id"], request["limits"], channel)
      except OSError as error:
        with contextlib.suppress(OSError):
          channel.sendall(
            wire.encode({"error": str(error), "code": error.errno})
          )
        self.send(event="gone", id=request["id"], status=-1)
        return
    with contextlib.suppress(OSError):  # the next request will tell
      while len(self.spares) < self.num_spares:
        self.spares.append(self.fork_spare(request["limits"]["disk_mb"]))

  def kill(self, request: int) -> None:
    """Ends an init that does not leave when its channel is closed."""
    for pidfd, (_, number) in self.living.items():
      if self.requests.get(number) == request:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

  def hand_over(
    self, request: int, limits: dict[str, Any], channel: socket.socket
  ) -> None:
    """Gives the channel to a spare with the right disk, made if need be."""
    disk_mb = limits["disk_mb"]
    for spare in [s for s in self.spares if s.disk_mb != disk_mb]:
      self.spares.remove(spare)
      if self.links.pop(spare.link.fileno(), None):
        # Its number may be the next descriptor's.
        self.poll.unregister(spare.link)
      spare.link.close()
      os.kill(spare.pid, signal.SIGKILL)
    spare = self.spares.pop(0) if self.spares else self.fork_spare(disk_mb)
    self.requests[spare.number] = request
    if self.stage.groups:
      # Files on its disk are charged to the same group; init is a process.
      memory = (limits["memory_mb"] + disk_mb) << 20
      self.stage.groups.limit(
        str(spare.number), memory, limits["processes"] + 1
      )
    message = json.dumps(limits).encode()
    try:
      socket.send_fds(spare.link, [message], [channel.fileno()])
    finally:
      if spare.link.fileno() not in self.links:
        spare.link.close()

  def fork_spare(self, disk_mb: int) -> Spare:
    """Forks an init into a pid namespace and control groups of its own."""
    number, self.next_number = self.next_number, self.next_number + 1
    files: dict[str, list[str]] = {"join": [], "memory": [], "pids": []}
    if self.stage.groups:
      files = self.stage.groups.create(str(number))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = _fork_first_of_namespace()
    if pid == 0:
      self.become_init(disk_mb, files, theirs)
    theirs.close()
    pidfd = os.pidfd_open(pid)
    self.living[pidfd] = (pid, number)
    self.poll.register(pidfd, select.POLLIN)
    spare = Spare(number, pid, disk_mb, ours)
    self.links[ours.fileno()] = spare
    self.poll.register(ours, select.POLLIN)
    return spare

  def become_init(
    self, disk_mb: int, files: dict[str, list[str]], link: socket.socket
  ) -> NoReturn:
    """In the child: groups, mounts, namespaces; then serves as pid 1."""
    handover: list[tuple[dict[str, Any], socket.socket]] = []
    try:
      error: BaseException | None = None
      try:
        init = self._boot(disk_mb, files, link, handover)
      except BaseException as failure:
        error = failure
      while not handover:
        _read_link(link, handover)
      limits, channel = handover[0]
      link.close()
      if error is None:
        init.serve(channel, limits)
      code = getattr(error, "errno", None)
      channel.sendall(wire.encode({"error": str(error), "code": code}))
    finally:
      os._exit(1)

  def _boot(
    self,
    disk_mb: int,
    files: dict[str, list[str]],
    link: socket.socket,
    handover: list[tuple[dict[str, Any], socket.socket]],
  ) -> inside.Init:
    self.control.detach()
    os.closerange(3, link.fileno())
    os.closerange(link.fileno() + 1, 1 << 16)
    counters = {}
    for kind in ("memory", "pids"):
      counters[kind] = [os.open(p, os.O_RDONLY) for p in files[kind]]
    for path in files["join"]:
      with open(path, "w") as file:
        file.write("0")
    # When memory runs out its commands shall go and it shall stay; where
    # this is not allowed they still volunteer (see `inside`).
    with contextlib.suppress(OSError):
      with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    self.stage.mount_sandbox(disk_mb)
    kernel.unshare(
      kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
      | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET | kernel.CLONE_NEWCGROUP,
      "user, mount, ipc, uts, net, cgroup",
    )  # fmt: skip
    link.send(b"map")
    while not _read_link(link, handover):
      pass
    if self.stage.root:
      # Whoever has all three groups of a process may set its limits: none of
      # its commands has these.
      os.setresgid(0, 0, _INIT_GROUP)
      os.setgroups([])
    else:
      os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # After the ids, as changing them clears it.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    return inside.Init(
      counters, self.stage.system, list(self.stage.binds), disk_mb
    )

  def map_ids(self, fd: int) -> None:
    """An init has its user namespace: write the maps, tell it to go on."""
    spare = self.links.pop(fd)
    self.poll.unregister(fd)
    try:
      if spare.link.recv(16) == b"map":
        maps = self.stage.maps()
        write_maps(f"/proc/{spare.pid}", maps, maps)
        spare.link.send(b"mapped")
    except OSError as error:
      with contextlib.suppress(OSError):
        spare.link.send(f"uid_map: {error}".encode())
    if spare not in self.spares:
      spare.link.close()

  def reap(self, pidfd: int) -> None:
    """An init has ended, and with it its sandbox."""
    pid, number = self.living.pop(pidfd)
    self.poll.unregister(pidfd)
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    for spare in [s for s in self.spares if s.number == number]:
      self.spares.remove(spare)
    if self.stage.groups:
      self.stage.groups.remove(str(number))
    request = self.requests.pop(number, None)
    if request is not None:
      self.send(event="gone", id=request, status=status)


def _fork_first_of_namespace() -> int:
  """Forks a child that is pid 1 of a new pid namespace; 0 in the child.

  A process that asks for such a namespace only sends its children there, for
  good, so one in between asks, forks, and leaves its child to us.
  """
  reader, writer = os.pipe()
  between = os.fork()
  if between == 0:
    try:
      kernel.unshare(kernel.CLONE_NEWPID, "pid")
      child = os.fork()
      if child == 0:
        return 0
      os.write(writer, str(child).encode())
    except OSError as error:
      os.write(writer, f"{error.errno} {error.strerror}".encode())
    os._exit(0)
  os.close(writer)
  with open(reader, "rb") as pipe:
    said = pipe.read(4096).decode()
  os.waitpid(between, 0)
  if not said.isdigit():
    code, _, text = said.partition(" ")
    raise OSError(int(code or 1), text or "a fork failed")
  return int(said)


def _read_link(
  link: socket.socket, handover: list[tuple[dict[str, Any], socket.socket]]
) -> bool:
  """In an init: reads one message; whether it was "your ids are mapped"."""
  message, fds, _, _ = socket.recv_fds(link, 1 << 16, 1)
  if fds:
    # What is received is inherited by every command unless told otherwise,
    # and whoever has the channel can answer in init's place.
    os.set_inheritable(fds[0], False)
    handover.append((json.loads(message), socket.socket(fileno=fds[0])))
    return False
  if message != b"mapped":
    raise OSError(1, message.decode() or "the zygote is gone")
  return True


def main() -> NoReturn:
  """Entry point; ends with one "fatal" event where the kernel says no."""
  control = socket.socket(fileno=int(sys.argv[1]))
  config = json.loads(sys.argv[2])
  os.umask(0o022)
  kernel.rename_process("t1jax-init")
  kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the owner's matter
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  sys.path[:] = []  # nothing is imported from here on
  try:
    zygote = Zygote(control, config)
  except OSError as error:
    fatal = {"event": "fatal", "error": str(error), "code": error.errno}
    control.send(json.dumps(fatal).encode())
    sys.exit(1)
  gc.collect()
  gc.freeze()
  gc.disable()
  zygote.run()


if __name__ == "__main__":
  main()
