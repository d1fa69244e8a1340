"""Three looks at one sandbox: init's own, the agent's, the verifier's.

Init sees the sandbox's disk: `/m` (the agent's root: overlays), `/rw` (what
was written), `/lower` and `/template` (the pristine layers), `/image` (what
set-up wrote into system directories). The agent's root is `/m` and nothing
else. The verifier gets the pristine system directories with the image's
changes, everything else as the agent left it, and fresh `/tests`, `/logs` and
`/verifier` on a disk of its own that no process of the agent can reach.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator

from t1jax.sandbox import kernel

# Directories of the template that are system directories, besides the lowers.
_SYSTEM = ("etc", "proc", "dev", "sys")
# Names at the top that would steer the tests' tools, or that are the
# verifier's own.
_WITHHELD = frozenset({
  "tests", "logs", "verifier",
  "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "pyproject.toml",
  "setup.cfg", "setup.py",
})  # fmt: skip


class Views:
  """Mount namespaces by name; entered and left by init itself."""

  def __init__(self, system: list[str], disk_mb: int) -> None:
    """Makes the agent's view of init's own (see `stage.Stage`)."""
    self.system = system
    self.disk_mb = disk_mb
    self.files = {"init": self._open()}
    kernel.unshare(kernel.CLONE_NEWNS, "mount")
    # Mounts that came from outside are locked in place; a bind of them can
    # be made the root.
    kernel.bind("/m", "/m", recursive=True)
    kernel.enter_root("/m")
    self.files["agent"] = self._open("/proc")
    self.enter("init")

  @staticmethod
  def _open(proc: str = "/m/proc") -> int:
    return os.open(f"{proc}/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

  def enter(self, view: str) -> None:
    """Enters a view; its root becomes ours."""
    kernel.setns(self.files[view], kernel.CLONE_NEWNS)

  @contextlib.contextmanager
  def inside(self, view: str) -> Iterator[None]:
    """Enters a view for a while."""
    self.enter(view)
    try:
      yield
    finally:
      self.enter("init")

  def seal(self) -> None:
    """Copies what was written to system directories into the image."""
    for path in ["/etc", *self.system]:
      written = f"/rw/root/u{path}" if path == "/etc" else f"/rw{path}/u"
      lower = f"/template{path}" if path == "/etc" else f"/lower{path}"
      if os.path.isdir(written) and os.listdir(written):
        shutil.rmtree(f"/image{path}", ignore_errors=True)
        _copy_layer(written, f"/m{path}", lower, f"/image{path}")

  def open_verifier(self, keep_system: bool) -> None:
    """Makes the verifier's view.

    Args:
      keep_system: leave the agent's changes to system directories in force.
    """
    self.close_verifier()
    kernel.unshare(kernel.CLONE_NEWNS, "mount")
    try:
      self._build_verifier(keep_system)
      self.files["verifier"] = self._open("/proc")
    finally:
      self.enter("init")

  def _build_verifier(self, keep_system: bool) -> None:
    disk = f"mode=755,size={self.disk_mb}m,nr_inodes=200k"
    kernel.mount("tmpfs", "/verify", "tmpfs", kernel.MS_NOSUID, disk)
    for name in ("root", "u", "w"):
      os.mkdir(f"/verify/{name}", 0o755)
    root = "/verify/root"
    kernel.mount(
      "overlay", root, "overlay", 0,
      "lowerdir=/template,upperdir=/verify/u,workdir=/verify/w,userxattr",
    )  # fmt: skip
    for path in ["/etc", *self.system]:
      self._system(path, root + path, keep_system)
    skipped = {p.lstrip("/") for p in self.system} | set(_SYSTEM) | _WITHHELD
    here = set(os.listdir("/m")) - skipped
    for name in set(os.listdir(root)) - here - skipped:
      _remove(f"{root}/{name}")  # of the template, but the agent removed it
    for name in here:
      _show(f"/m/{name}", f"{root}/{name}")
    for name in ("proc", "dev"):
      kernel.bind(f"/m/{name}", f"{root}/{name}", recursive=True)
    for name in ("tests", "logs/verifier", "verifier/home", "verifier/bin"):
      os.makedirs(f"{root}/{name}")
    kernel.enter_root(root)

  def _system(self, path: str, target: str, keep: bool) -> None:
    lower = "/template/etc" if path == "/etc" else f"/lower{path}"
    if keep:
      kernel.bind(f"/m{path}", target, recursive=True)
    elif os.path.isdir(f"/image{path}"):
      layers = f"lowerdir=/image{path}:{lower},userxattr"
      kernel.mount("overlay", target, "overlay", 0, layers)
    elif path != "/etc":
      kernel.bind(lower, target)
      kernel.make_read_only(target)

  def close_verifier(self) -> None:
    """Lets go of the verifier's view; its disk goes with it."""
    fd = self.files.pop("verifier", None)
    if fd is not None:
      os.close(fd)


def _show(source: str, target: str) -> None:
  """Makes one entry of the agent's root visible in the verifier's."""
  mode = os.lstat(source).st_mode
  if stat.S_ISDIR(mode) and not os.path.islink(target):
    os.makedirs(target, exist_ok=True)
    kernel.bind(source, target, recursive=True)
    return
  if os.path.lexists(target):
    _remove(target)
  if stat.S_ISDIR(mode):
    os.mkdir(target)
    kernel.bind(source, target, recursive=True)
  elif stat.S_ISLNK(mode):
    os.symlink(os.readlink(source), target)
  elif stat.S_ISREG(mode):
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.bind(source, target)


def _remove(path: str) -> None:
  if os.path.isdir(path) and not os.path.islink(path):
    shutil.rmtree(path)
  else:
    os.unlink(path)


def _copy_layer(written: str, merged: str, lower: str, target: str) -> None:
  """Copies an overlay's written files to a plain tree that can be a layer.

  Directories that the lower layer lacks are copied as they appear; deleted
  files become whiteouts (device 0, 0).
  """
  os.makedirs(target, exist_ok=True)
  for entry in os.scandir(written):
    source = f"{merged}/{entry.name}"
    copy = f"{target}/{entry.name}"
    if entry.is_symlink():
      os.symlink(os.readlink(entry.path), copy)
    elif entry.is_dir():
      if os.path.isdir(f"{lower}/{entry.name}"):
        _copy_layer(entry.path, source, f"{lower}/{entry.name}", copy)
      else:
        shutil.copytree(source, copy, symlinks=True)
    elif entry.is_file(follow_symlinks=False):
      shutil.copy2(source, copy)
    elif stat.S_ISCHR(entry.stat(follow_symlinks=False).st_mode):
      os.mknod(copy, stat.S_IFCHR, 0)
