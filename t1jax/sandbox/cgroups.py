"""Limits on memory and processes by control groups, version 1 or 2.

A farm owns one group per hierarchy, named after its process and that process'
start time; each sandbox has a group below it. Where groups cannot be made (an
ordinary user, mostly) the list is empty and init uses rlimits instead.
Version 2 follows the kernel's cgroup-v2 document.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time

PREFIX = "t1jax-"


@dataclasses.dataclass(frozen=True)
class Hierarchy:
  """One mounted hierarchy and the directory in it where groups may be made."""

  controllers: tuple[str, ...]  # of "memory", "pids"
  version: int
  root: str


def hierarchies() -> list[Hierarchy]:
  """Those that carry a controller we need; v1 first, v2 for the rest."""
  found: list[Hierarchy] = []
  try:
    with open("/proc/self/cgroup") as lines:
      own = {}
      for line in lines:
        _, names, path = line.rstrip("\n").split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    with open("/proc/self/mounts") as lines:
      mounts = [line.split() for line in lines]
  except OSError:
    return found
  wanted = ["memory", "pids"]
  for _, point, kind, options, *_ in mounts:
    if kind != "cgroup":
      continue
    here = tuple(c for c in wanted if c in options.split(","))
    if here:
      inner = os.path.join(point, own.get(here[0], "/").lstrip("/"))
      found.append(Hierarchy(here, 1, inner if os.path.isdir(inner) else point))
      wanted = [c for c in wanted if c not in here]
  for _, point, kind, *_ in mounts:
    if kind != "cgroup2" or not wanted:
      continue
    with contextlib.suppress(OSError):
      with open(f"{point}/cgroup.controllers") as file:
        here = tuple(c for c in wanted if c in file.read().split())
      if here:
        # A group that holds processes cannot hand controllers down, so the
        # farm's group hangs below the root rather than below our own.
        found.append(Hierarchy(here, 2, point))
        wanted = [c for c in wanted if c not in here]
  return found


def _write(path: str, text: str) -> None:
  with open(path, "w") as file:
    file.write(text)


class Groups:
  """The groups of one farm; holds paths only, opened in the zygote."""

  def __init__(self, owner: str) -> None:
    """Makes the farm's groups; keeps those hierarchies that allow it.

    Args:
      owner: "<pid>-<start time>" of the farm's process.
    """
    self.parents: list[tuple[Hierarchy, str]] = []
    for hierarchy in hierarchies():
      parent = os.path.join(hierarchy.root, PREFIX + owner)
      try:
        os.makedirs(parent, exist_ok=True)
        if hierarchy.version == 2:
          for path in (hierarchy.root, parent):
            for controller in hierarchy.controllers:
              _write(f"{path}/cgroup.subtree_control", f"+{controller}")
      except OSError:
        with contextlib.suppress(OSError):
          os.rmdir(parent)
        continue
      self.parents.append((hierarchy, parent))

  def controllers(self) -> list[str]:
    """The controllers in force."""
    return [c for h, _ in self.parents for c in h.controllers]

  def create(self, name: str) -> dict[str, list[str]]:
    """Makes a sandbox's groups, without limits yet.

    Returns:
      paths: "join" (write "0" to enter), "memory" and "pids" (files that
      count each kill and each refusal).
    """
    files: dict[str, list[str]] = {"join": [], "memory": [], "pids": []}
    for hierarchy, parent in self.parents:
      group = os.path.join(parent, name)
      os.mkdir(group)
      kills = (
        "memory.oom_control" if hierarchy.version == 1 else ("memory.events")
      )
      counters = {"memory": kills, "pids": "pids.events"}
      for controller in hierarchy.controllers:
        files[controller].append(f"{group}/{counters[controller]}")
      files["join"].append(f"{group}/cgroup.procs")
    return files

  def limit(self, name: str, memory_bytes: int, processes: int) -> None:
    """Sets the limits of a sandbox's groups."""
    for hierarchy, parent in self.parents:
      group = os.path.join(parent, name)
      if "pids" in hierarchy.controllers:
        _write(f"{group}/pids.max", str(processes))
      if "memory" not in hierarchy.controllers:
        continue
      memory = str(memory_bytes)
      if hierarchy.version == 1:
        _write(f"{group}/memory.limit_in_bytes", memory)
        swap, most = "memory.memsw.limit_in_bytes", memory
      else:
        _write(f"{group}/memory.max", memory)
        swap, most = "memory.swap.max", "0"
      with contextlib.suppress(OSError):  # only where swap is counted
        _write(f"{group}/{swap}", most)

  def remove(self, name: str) -> None:
    """Removes a sandbox's groups, once its processes are gone."""
    for _, parent in self.parents:
      _remove_group(os.path.join(parent, name))

  def close(self) -> None:
    """Removes the farm's own groups, and any that was left below."""
    for _, parent in self.parents:
      _remove_tree(parent)


def _remove_group(group: str) -> bool:
  # An exiting process leaves its group a moment after it was reaped.
  for attempt in range(50):
    try:
      os.rmdir(group)
      return True
    except FileNotFoundError:
      return True
    except OSError:
      time.sleep(0.001 * (attempt + 1))
  return False


def _remove_tree(parent: str) -> bool:
  try:
    children = [e.path for e in os.scandir(parent) if e.is_dir()]
  except OSError:
    return True
  for group in children:
    with contextlib.suppress(OSError), open(f"{group}/cgroup.procs") as file:
      for pid in file.read().split():
        os.kill(int(pid), signal.SIGKILL)
    _remove_group(group)
  return _remove_group(parent)


def owners() -> list[str]:
  """The "<pid>-<start time>" of every farm that has left a group."""
  names = set()
  for hierarchy in hierarchies():
    with contextlib.suppress(OSError):
      names.update(
        entry.name.removeprefix(PREFIX)
        for entry in os.scandir(hierarchy.root)
        if entry.name.startswith(PREFIX)
      )
  return sorted(names)


def sweep(owner: str) -> None:
  """Kills what a dead farm left in its groups, then removes them."""
  for hierarchy in hierarchies():
    _remove_tree(os.path.join(hierarchy.root, PREFIX + owner))
