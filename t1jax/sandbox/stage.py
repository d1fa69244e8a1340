"""Where sandboxes are mounted: a private root with the host's lower layers.

The stage is a mount namespace of the zygote, with the lower layers and nothing
else of the host; each sandbox copies it and adds its own disk and overlays.

As root, the lower layers are bound with shifted owners and the overlay is
mounted with trusted attributes, so that renames of lower directories and
deletes of merged ones work; user 0 inside is a plain, unused id outside. An
ordinary user first makes a user namespace of their own to mount in; system
directories are then read-only in effect, as their owner has no id inside.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from t1jax.sandbox import cgroups, kernel

# User and group ids of a sandbox are FIRST_ID + their number inside. Inside
# the range that systemd leaves to containers; nothing else may own files
# there.
FIRST_ID, NUM_IDS = 1_700_000_000, 65_536

_DEVICES = (("null", 3), ("zero", 5), ("full", 7), ("random", 8),
            ("urandom", 9), ("tty", None))  # fmt: skip


class Stage:
  """The zygote's private root, ready to be copied by each sandbox."""

  def __init__(self, config: dict[str, Any]) -> None:
    """Builds it; raises OSError naming the call that was refused.

    Args:
      config: "run_dir", "owner" ("pid-start"), "system" (host directories
        such as "/usr"), "binds" ({path inside: host path}, read-only).
    """
    self.system: list[str] = config["system"]
    self.binds: dict[str, str] = config["binds"]
    self.shifted = False
    uid, gid = os.getuid(), os.getgid()
    self.root = has_all_ids()
    self.groups = cgroups.Groups(config["owner"]) if uid == 0 else None
    if self.root:
      kernel.unshare(kernel.CLONE_NEWNS, "mount")
    else:
      kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS, "user, mount")
      write_maps("/proc/self", f"0 {uid} 1", f"0 {gid} 1")
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    self._build(config["run_dir"])

  def _build(self, run_dir: str) -> None:
    top = f"{run_dir}/stage"
    kernel.mount("tmpfs", top, "tmpfs", 0, "mode=755")
    for name in ("proc", "dev", "template", "lower", "binds", "s"):
      os.mkdir(f"{top}/{name}")
    kernel.bind(f"{run_dir}/template", f"{top}/template")
    places = {path: f"{top}/lower{path}" for path in self.system}
    for index, source in enumerate(self.binds.values()):
      places[source] = f"{top}/binds/{index}"
    self._show_host(places)
    self._devices(f"{top}/dev")
    kernel.bind("/proc", f"{top}/proc", recursive=True)
    groups = self.groups.parents if self.groups else []
    for hierarchy, _ in groups:
      # The groups' paths stay what they are on the host.
      os.makedirs(top + hierarchy.root, exist_ok=True)
      kernel.bind(hierarchy.root, top + hierarchy.root)
    kernel.enter_root(top)

  def _show_host(self, places: dict[str, str]) -> None:
    """Binds host paths, owners shifted where that is possible."""
    for source, target in places.items():
      if os.path.isdir(source):
        os.mkdir(target)
      else:
        os.close(os.open(target, os.O_CREAT))
    if self.root:
      ids = _user_namespace(self)
      try:
        for source, target in places.items():
          kernel.bind_with_ids(source, target, ids)
        self.shifted = True
        return
      except OSError:
        # A file system without shifted owners (an overlay as root, kernels
        # before 5.19): bind as it is, owners then show as nobody.
        for target in places.values():
          with contextlib.suppress(OSError):
            kernel.unmount(target)
      finally:
        os.close(ids)
    for source, target in places.items():
      kernel.bind(source, target)

  def _devices(self, dev: str) -> None:
    kernel.mount("tmpfs", dev, "tmpfs", kernel.MS_NOSUID, "mode=755")
    for name, minor in _DEVICES:
      path = f"{dev}/{name}"
      if self.root:
        major = 5 if minor is None else 1
        os.mknod(path, 0o020666, os.makedev(major, minor or 0))
        os.chmod(path, 0o666)
      else:  # a user namespace may not make devices, but may bind them
        os.close(os.open(path, os.O_CREAT))
        kernel.bind(f"/dev/{name}", path)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"),
                         ("stdout", "fd/1"), ("stderr", "fd/2"),
                         ("ptmx", "pts/ptmx")):  # fmt: skip
      os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/pts")
    os.mkdir(f"{dev}/shm")

  def maps(self) -> str:
    """The lines of a sandbox's uid_map and gid_map."""
    return f"0 {FIRST_ID} {NUM_IDS}" if self.root else "0 0 1"

  def mount_sandbox(self, disk_mb: int) -> None:
    """In the child: makes the sandbox's own root and enters it.

    Afterwards `/` is the sandbox's private disk: `m` is what the agent sees,
    `lower`, `template` and `binds` are pristine, `verify` is a mount point.
    """
    kernel.unshare(kernel.CLONE_NEWNS, "mount")
    size = f"mode=755,size={disk_mb}m,nr_inodes=200k"
    kernel.mount("tmpfs", "/s", "tmpfs", kernel.MS_NOSUID, size)
    for name in ("m", "verify", "lower", "template", "image", "shm", "binds"):
      os.mkdir(f"/s/{name}")
    os.chmod("/s/shm", 0o1777)
    self._own("/s/image")
    self._overlay("/template", "/s/rw/root", "/s/m")
    kernel.bind("/template", "/s/template")
    for path in self.system:
      os.mkdir(f"/s/lower{path}")
      kernel.bind(f"/lower{path}", f"/s/lower{path}")
      self._overlay(f"/lower{path}", f"/s/rw{path}", f"/s/m{path}")
    quiet = kernel.MS_NOSUID | kernel.MS_NOEXEC
    kernel.mount("proc", "/s/m/proc", "proc", quiet | kernel.MS_NODEV)
    kernel.bind("/dev", "/s/m/dev", recursive=True)
    kernel.mount(
      "devpts", "/s/m/dev/pts", "devpts", quiet,
      "newinstance,ptmxmode=0666,mode=620",
    )  # fmt: skip
    kernel.bind("/s/shm", "/s/m/dev/shm")
    kernel.make_read_only("/s/m/dev", kernel.MS_NOSUID)
    for index, target in enumerate(self.binds):
      kept = f"/s/binds/{index}"
      if os.path.isdir(f"/binds/{index}"):
        os.mkdir(kept)
      else:
        os.close(os.open(kept, os.O_CREAT))
      for place in (kept, f"/s/m{target}"):
        kernel.bind(f"/binds/{index}", place)
        kernel.make_read_only(place)
    kernel.enter_root("/s")

  def _own(self, path: str) -> None:
    owner = FIRST_ID if self.root else 0
    os.chown(path, owner, owner)

  def _overlay(self, lower: str, private: str, target: str) -> None:
    os.makedirs(f"{private}/w")
    os.mkdir(f"{private}/u", 0o755)
    self._own(f"{private}/u")
    # In a user namespace only user attributes may be written; as root the
    # trusted ones allow redirects too, without which renaming a lower
    # directory fails with EXDEV.
    options = "redirect_dir=on" if self.root else "userxattr"
    kernel.mount(
      "overlay", target, "overlay", 0,
      f"lowerdir={lower},upperdir={private}/u,workdir={private}/w,{options}",
    )  # fmt: skip


def has_all_ids() -> bool:
  """Whether this process is root of the whole machine, not of a namespace."""
  with open("/proc/self/uid_map") as file:
    whole = file.read().split() == ["0", "0", "4294967295"]
  return whole and os.geteuid() == 0


def write_maps(process: str, users: str, groups: str) -> None:
  """Gives the user namespace of `/proc/<pid>` its ids."""
  with open(f"{process}/uid_map", "w") as file:
    file.write(users)
  try:
    with open(f"{process}/gid_map", "w") as file:
      file.write(groups)
  except PermissionError:
    with open(f"{process}/setgroups", "w") as file:
      file.write("deny")
    with open(f"{process}/gid_map", "w") as file:
      file.write(groups)


def _user_namespace(stage: Stage) -> int:
  """A file descriptor of a user namespace with a sandbox's ids."""
  ready_r, ready_w = os.pipe()
  done_r, done_w = os.pipe()
  pid = os.fork()
  if pid == 0:
    try:
      kernel.unshare(kernel.CLONE_NEWUSER, "user")
      os.write(ready_w, b"r")
      os.close(done_w)
      os.read(done_r, 1)
    finally:
      os._exit(0)
  os.close(ready_w)
  os.close(done_r)
  try:
    if os.read(ready_r, 1) != b"r":
      raise OSError(1, "unshare user: refused in the zygote's child")
    write_maps(f"/proc/{pid}", stage.maps(), stage.maps())
    return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
  finally:
    os.close(done_w)
    os.close(ready_r)
    os.waitpid(pid, 0)
