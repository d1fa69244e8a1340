"""Three looks at one sandbox: init's own, the agent's, the verifier's.

Init sees the sandbox's disk: `/m` (the agent's root: overlays), `/rw` (what
was written), `/lower`, `/template` and `/binds` (the pristine layers),
`/image` (what set-up wrote into system directories). The agent's root is `/m`
and nothing else. The verifier gets the pristine system directories (links
such as `/bin` and binds included) with the image's changes, everything else as
the agent left it, and fresh `/tests`, `/logs` and `/verifier` on a disk of its
own that no process of the agent can reach. Whatever an agent did to its root,
this view can be made: an agent cannot turn its failure into ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Set

from t1jax.sandbox import kernel

# Names at the top without which no program starts, links or directories.
_PROGRAMS = frozenset({
  "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32",
})  # fmt: skip
# Names at the top that would steer the tests' tools, or that are the
# verifier's own.
_WITHHELD = frozenset({
  "proc", "dev", "sys", "tests", "logs", "verifier",
  "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "pyproject.toml",
  "setup.cfg", "setup.py",
})  # fmt: skip
# Of one directory; each is a mount, which takes time and kernel memory.
_MOST_NAMES = 1000


class Views:
  """Mount namespaces by name; entered and left by init itself."""

  def __init__(self, system: list[str], binds: list[str], disk_mb: int) -> None:
    """Makes the agent's view of init's own (see `stage.Stage`)."""
    self.system = system
    self.binds = binds
    self.disk_mb = disk_mb
    self.files = {"init": self._open()}
    kernel.unshare(kernel.CLONE_NEWNS, "mount")
    # Mounts that came from outside are locked in place; a bind of them can
    # be made the root.
    kernel.bind("/m", "/m", recursive=True)
    # Its user owns some settings of its namespaces, limits among them.
    kernel.bind("/m/proc/sys", "/m/proc/sys")
    kernel.make_read_only("/m/proc/sys")
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
    hidden = _WITHHELD | {path.lstrip("/") for path in self.system}
    for path in self.system:
      self._system(path, root + path, keep_system)
    if not keep_system:
      self._system("/etc", f"{root}/etc", keep_system)
      hidden |= _PROGRAMS
    if self.binds:
      hidden |= {"opt"}
      self._show_opt(f"{root}/opt")
    _show_all("/m", root, hidden)
    for name in ("proc", "dev"):
      kernel.bind(f"/m/{name}", f"{root}/{name}", recursive=True)
    for name in ("tests", "logs/verifier", "verifier/home", "verifier/bin"):
      os.makedirs(f"{root}/{name}")
    kernel.enter_root(root)

  def _show_opt(self, target: str) -> None:
    """What the agent left in `/opt`, with the binds as they were."""
    mode = os.lstat("/m/opt").st_mode if os.path.lexists("/m/opt") else 0
    if stat.S_ISDIR(mode):
      tops = {path.split("/")[2] for path in self.binds}  # below /opt, all
      _show_all("/m/opt", target, tops)
    for index, path in enumerate(self.binds):
      kernel.bind(f"/binds/{index}", target + path.removeprefix("/opt"))

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


def _show_all(source: str, target: str, hidden: Set[str]) -> None:
  """Makes a directory's entries visible in another that has some already.

  Past `_MOST_NAMES` they are left out, those that the image lacks first.
  """
  given = set(os.listdir(target)) - hidden
  left = set(os.listdir(source)) - hidden
  for name in given - left:
    _remove(f"{target}/{name}")  # of the template, but the agent removed it
  names = sorted(left, key=lambda name: (name not in given, name))
  for name in names[:_MOST_NAMES]:
    # A process that was kept may take a name away meanwhile.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      _show(f"{source}/{name}", f"{target}/{name}")


def _show(source: str, target: str) -> None:
  """Makes one entry visible elsewhere, whatever it is."""
  mode = os.lstat(source).st_mode
  if os.path.lexists(target):
    if stat.S_ISDIR(mode) and stat.S_ISDIR(os.lstat(target).st_mode):
      kernel.bind(source, target, recursive=True)
      return
    _remove(target)
  if stat.S_ISLNK(mode):  # a bind would follow it
    os.symlink(os.readlink(source), target)
    return
  if stat.S_ISDIR(mode):
    os.mkdir(target)
  else:
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
  kernel.bind(source, target, recursive=True)


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
