"""The root directory that every sandbox starts from, and the host's share.

An allow-list: system directories (`/usr`, and `/bin` and the like where they
are not links into it) are lower layers; of `/etc` only what programs need to
run is copied, and nothing that is secret or names the host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Mapping

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_EMPTY = (
  "app", "dev", "etc", "home", "home/agent", "media", "mnt", "opt", "proc",
  "root", "run", "srv", "sys", "tmp", "usr", "var", "var/cache", "var/lib",
  "var/log", "var/spool", "var/tmp",
)  # fmt: skip
# Name of a file or directory in /etc, or a prefix followed by "*".
_ETC = (
  "alternatives", "debian_version", "fonts", "gai.conf", "host.conf", "java*",
  "ld.so*", "locale.alias", "localtime", "login.defs", "magic", "mime.types",
  "os-release", "perl", "profile", "protocols", "python3*", "rpc", "services",
  "shells", "terminfo", "timezone", "xattr.conf",
)  # fmt: skip
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"  # public, and looked for
_ETC_OWN = {
  "passwd": (
    "root:x:0:0:root:/root:/bin/bash\n"
    "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n"
    "agent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
  ),
  "group": (
    "root:x:0:\ndaemon:x:1:\ntty:x:5:\nadm:x:4:\nwww-data:x:33:\n"
    "users:x:100:\nagent:x:1000:\nnogroup:x:65534:\n"
  ),
  "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
  "hostname": "sandbox\n",
  "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
  "resolv.conf": "",
}
# Where a Python from outside /usr is shown, and where its programs are.
PYTHON_PREFIX = "/opt/python"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def system_directories() -> list[str]:
  """Directories of the host that become lower layers."""
  return [
    path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)
  ]


def python_bind() -> dict[str, str]:
  """How `python3` gets inside where `/usr` has none.

  Returns:
    {path inside: host path} of this interpreter's installation (its prefix,
    never the home directory around it), or {} when `/usr` has a python3.
  """
  if os.path.exists("/usr/bin/python3") or sys.base_prefix == "/usr":
    return {}
  if sys.base_prefix == "/usr/local":
    return {}
  return {PYTHON_PREFIX: sys.base_prefix}


def search_path(binds: Mapping[str, str]) -> str:
  """PATH of commands in a sandbox that has these binds."""
  return _PATH + (f":{PYTHON_PREFIX}/bin" if PYTHON_PREFIX in binds else "")


def loader_settings(binds: Mapping[str, str]) -> dict[str, str]:
  """Environment without which that Python would not find its own library.

  Empty unless it is bound and linked to a libpython in its prefix, which has
  another name inside.
  """
  if PYTHON_PREFIX in binds and sysconfig.get_config_var("Py_ENABLE_SHARED"):
    return {"LD_LIBRARY_PATH": f"{PYTHON_PREFIX}/lib"}
  return {}


def build(path: str, binds: dict[str, str], first_id: int | None) -> None:
  """Makes the template directory.

  Args:
    path: where; must not exist.
    binds: {path inside: host path}; each gets a mount point.
    first_id: owner of everything, or None for the caller.

  Raises:
    OSError: also when the disk is full.
  """
  os.mkdir(path, 0o755)
  for name in _EMPTY:
    os.mkdir(f"{path}/{name}", 0o755)
  os.chmod(f"{path}/tmp", 0o1777)
  os.chmod(f"{path}/var/tmp", 0o1777)
  os.chmod(f"{path}/root", 0o700)
  for directory in _SYSTEM:
    if os.path.islink(directory):
      os.symlink(os.readlink(directory), path + directory)
    elif os.path.isdir(directory):
      os.makedirs(path + directory, exist_ok=True)
  _copy_etc(f"{path}/etc")
  for target, source in binds.items():
    if os.path.isdir(source):
      os.makedirs(path + target, exist_ok=True)
    else:
      os.makedirs(os.path.dirname(path + target), exist_ok=True)
      os.close(os.open(path + target, os.O_CREAT, 0o644))
  for directory, _, files in os.walk(path):
    for entry in (directory, *(os.path.join(directory, f) for f in files)):
      if first_id is not None:
        os.lchown(entry, first_id, first_id)
  if first_id is not None:
    os.chown(f"{path}/home/agent", first_id + 1000, first_id + 1000)


def _copy_etc(target: str) -> None:
  for name in os.listdir("/etc"):
    wanted = any(
      name.startswith(p[:-1]) if p.endswith("*") else name == p for p in _ETC
    )
    if wanted and name not in _ETC_OWN:
      _copy(f"/etc/{name}", f"{target}/{name}")
  if os.path.exists(_AUTHORITIES):
    os.makedirs(f"{target}/ssl/certs")
    shutil.copyfile(_AUTHORITIES, f"{target}/ssl/certs/ca-certificates.crt")
  for name, text in _ETC_OWN.items():
    with open(f"{target}/{name}", "w") as file:
      file.write(text)


def _copy(source: str, target: str) -> None:
  """Copies what may be read; links stay links."""
  mode = os.lstat(source).st_mode
  if stat.S_ISLNK(mode):
    os.symlink(os.readlink(source), target)
  elif stat.S_ISDIR(mode):
    os.mkdir(target, 0o755)
    for name in os.listdir(source):
      _copy(f"{source}/{name}", f"{target}/{name}")
  elif stat.S_ISREG(mode) and mode & stat.S_IROTH:
    with contextlib.suppress(PermissionError):
      shutil.copyfile(source, target)
      os.chmod(target, stat.S_IMODE(mode))
