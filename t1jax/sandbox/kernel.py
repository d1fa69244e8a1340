"""The few Linux system calls that Python's `os` lacks, through ctypes.

Standard library only and no state: the zygote and the sandboxes' init run on
a bare interpreter. Every call raises OSError with what it was asked to do.
Sources: mount(2), mount_setattr(2), namespaces(7), capabilities(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36

_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOUNT_ATTR_IDMAP = 0x00100000
_MOVE_MOUNT_F_EMPTY_PATH = 4
_IPC_RMID = 0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

# System calls from 424 on have one number on every architecture.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
  if result < 0:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")
  return result


def unshare(flags: int, what: str) -> None:
  """unshare(2); `what` names the namespaces in the error."""
  _check(_libc.unshare(flags), f"unshare {what}")


def setns(fd: int, flag: int) -> None:
  """setns(2): enters the namespace that `fd` is open on."""
  _check(_libc.setns(fd, flag), f"setns {flag:#x}")


def mount(
  source: str, target: str, kind: str = "", flags: int = 0, data: str = ""
) -> None:
  """mount(2)."""
  _check(
    _libc.mount(
      os.fsencode(source),
      os.fsencode(target),
      kind.encode() or None,
      ctypes.c_ulong(flags),
      data.encode() or None,
    ),
    f"mount {kind or 'bind'} {source} on {target} ({data})",
  )


def bind(source: str, target: str, *, recursive: bool = False) -> None:
  """Makes `source` visible at `target` too."""
  mount(source, target, flags=MS_BIND | (MS_REC if recursive else 0))


def make_read_only(target: str, flags: int = 0) -> None:
  """Remounts a bind mount read-only.

  What it forbids already it must go on forbidding: in a user namespace the
  kernel refuses anything else.
  """
  flags |= os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
  mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | flags)


def unmount(target: str) -> None:
  """Detaches the mount at `target` and all below it."""
  _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def enter_root(path: str) -> None:
  """Makes the mount at `path` the root and lets go of the old one."""
  os.chdir(path)
  number = _SYS_PIVOT_ROOT.get(platform.machine())
  if number is None:
    raise OSError(38, f"pivot_root: unknown machine {platform.machine()}")
  # With both arguments "." the old root ends up on top of the new one, from
  # where one unmount takes it away: no directory is needed for it.
  _check(_libc.syscall(number, b".", b"."), f"pivot_root {path}")
  unmount(".")
  os.chdir("/")


def bind_with_ids(source: str, target: str, user_namespace: int) -> None:
  """Binds `source`, its owners shifted as the user namespace maps them."""
  tree = _check(
    _libc.syscall(
      _SYS_OPEN_TREE,
      -100,
      source.encode(),
      _OPEN_TREE_CLONE | os.O_CLOEXEC,
    ),
    f"open_tree {source}",
  )
  try:
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
    _check(
      _libc.syscall(
        _SYS_MOUNT_SETATTR,
        tree,
        b"",
        _AT_EMPTY_PATH,
        attributes,
        ctypes.c_size_t(len(attributes)),
      ),
      f"mount_setattr idmap {source}",
    )
    _check(
      _libc.syscall(
        _SYS_MOVE_MOUNT,
        tree,
        b"",
        -100,
        target.encode(),
        _MOVE_MOUNT_F_EMPTY_PATH,
      ),
      f"move_mount {target}",
    )
  finally:
    os.close(tree)


def remove_ipc(proc: str) -> None:
  """Removes all System V shared memory, queues and semaphores.

  They outlive their processes, hold memory, and are this namespace's alone.
  """
  for kind in ("shm", "msg", "sem"):
    with open(f"{proc}/sysvipc/{kind}") as file:
      numbers = [int(line.split()[1]) for line in list(file)[1:]]
    for number in numbers:
      if kind == "sem":
        _libc.semctl(number, 0, _IPC_RMID)
      else:
        getattr(_libc, f"{kind}ctl")(number, _IPC_RMID, None)


def prctl(option: int, argument: int, second: int = 0) -> None:
  """prctl(2) with one number or two."""
  numbers = map(ctypes.c_ulong, (argument, second, 0, 0))
  _check(_libc.prctl(option, *numbers), f"prctl {option}")


def rename_process(name: str) -> None:
  """Replaces what `ps` shows of this process, arguments included.

  Whoever may list a process reads its command line: a sandbox's init, a fork
  of this process, must not show the paths of the host there.
  """
  _libc.prctl(PR_SET_NAME, name.encode()[:15] + b"\0", 0, 0, 0)
  with open("/proc/self/stat", "rb") as file:
    fields = file.read().rpartition(b")")[2].split()
  start, end = int(fields[45]), int(fields[46])  # fields 48, 49 of proc(5)
  size = end - start
  ctypes.memmove(start, name.encode()[: size - 1].ljust(size, b"\0"), size)


def keep_capabilities(kept: frozenset[int]) -> None:
  """Drops every other capability from the bounding set, for good.

  It takes effect at the next exec: a process of user 0 then gets exactly
  the bounding set.
  """
  for capability in range(64):
    if capability in kept:
      continue
    if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
      return  # past the kernel's last capability


def loopback_up() -> None:
  """Turns on `lo`, which is down in a new network namespace."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    request = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
    flags = struct.unpack_from("16sH", request)[1] | _IFF_UP
    fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))
