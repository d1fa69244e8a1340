"""Makes a sandbox look as a task's Dockerfile says.

The host's own programs stand in for the image, so FROM is only read. COPY is
an upload, WORKDIR and ENV are settings, and RUN runs inside, without network.
Installers (`apt-get`, `pip`) are replaced while RUN steps go: they check that
the host already has what is asked for, and everything that it lacks is
reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from t1jax.sandbox import base
from t1jax.sandbox.local import LocalSandbox
from t1jax.tasks import dockerfile
from t1jax.tasks.task import Task

TOOLS = "/run/installers"
_DEFAULT_WORKDIR = "/app"
# What a package brings when that is not a command of its own name; "" for
# libraries and data that nothing calls by name.
_COMMANDS = {
  "binutils": "ld", "build-essential": "gcc", "ca-certificates": "",
  "coreutils": "ls", "dnsutils": "dig", "findutils": "find", "g++": "g++",
  "iproute2": "ip", "iputils-ping": "ping", "locales": "",
  "net-tools": "ifconfig", "netcat": "nc", "netcat-openbsd": "nc",
  "openssh-client": "ssh", "openssh-server": "sshd", "p7zip-full": "7z",
  "procps": "ps", "python-is-python3": "python3", "python3-dev": "",
  "python3-pip": "", "python3-venv": "", "ripgrep": "rg",
  "software-properties-common": "", "tzdata": "", "util-linux": "mount",
  "xz-utils": "xz",
}  # fmt: skip
_NO_NETWORK = (
  "name resolution", "Could not resolve", "Network is unreachable",
)  # fmt: skip
_INSTALL = re.compile(r"\b(apt|apt-get|pip3?)\b")
_INSTALLER = r'''#!/usr/bin/env python3
"""Stands in for an installer: checks, notes what is missing, changes nothing.
"""
import importlib.metadata, json, os, re, shutil, sys
HERE = os.path.dirname(os.path.abspath(__file__))
COMMANDS = json.load(open(HERE + "/commands.json"))
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
missing = []
if name.startswith("apt"):
  words = words[words.index("install") + 1:] if "install" in words else []
  for word in words:
    package = re.split("[=:/]", word)[0]
    if not word.startswith("-"):
      command = COMMANDS.get(package, package)
      if command and not shutil.which(command):
        missing.append("command %s (package %s)" % (command, package))
else:
  words = words[words.index("install") + 1:] if "install" in words else []
  for word in words:
    if not word.startswith(("-", ".", "/")):
      wanted, _, version = word.partition("==")
      wanted = re.split(r"[<>=!~\[; ]", wanted)[0]
      try:
        found = importlib.metadata.version(wanted)
      except importlib.metadata.PackageNotFoundError:
        missing.append("Python package " + word)
      else:
        if version and found != version:
          missing.append("Python package %s (found %s)" % (word, found))
with open(HERE + "/missing", "a") as file:
  file.writelines(line + "\n" for line in missing)
'''


class MissingTool(base.SandboxError):
  """The host lacks what an environment installs.

  Attributes:
    missing: every lacking command or Python package, in words.
  """

  def __init__(self, task: str, missing: tuple[str, ...]) -> None:
    self.missing = missing
    super().__init__(
      f"task {task}: its Dockerfile installs what this machine lacks: "
      f"{', '.join(missing)}; install it on the host, or skip the task"
    )


async def install_environment(
  sandbox: LocalSandbox,
  task: Task,
  *,
  unneeded: Collection[str] = (),
  env: Mapping[str, str] | None = None,
) -> None:
  """Applies a task's environment to a sandbox that has just booted.

  Args:
    sandbox: a started sandbox.
    task: its `environment` holds the Dockerfile and what it copies.
    unneeded: packages that may be missing, such as those that only serve the
      recorder of another harness.
    env: variables added to what the Dockerfile sets.

  Raises:
    MissingTool: the host lacks something that is installed.
    TaskError: the Dockerfile cannot be read.
    SandboxError: a RUN step fails, or asks for another user than root.
  """
  text = task.environment["Dockerfile"].decode("utf-8", "replace")
  files: dict[str, base.FileSpec] = {}
  settings = {**(env or {})}
  workdir, ran = _DEFAULT_WORKDIR, False
  commands = {**_COMMANDS, **dict.fromkeys(unneeded, "")}
  installs = _INSTALL.search(text) is not None
  if installs:
    files |= installers(commands)
  for step in dockerfile.parse(text):
    if step.kind == "copy":
      files.update(dockerfile.copied_files(step, task.room("environment")))
    elif step.kind == "workdir":
      workdir = step.args[0]
      if workdir != _DEFAULT_WORKDIR:
        await sandbox.configure(workdir, {})  # makes it
    elif step.kind == "env":
      settings[step.args[0]] = step.args[1]
    elif step.kind == "user" and step.args[0] not in ("root", "0"):
      raise base.SandboxError(
        f"task {task.name}: Dockerfile line {step.line}: USER {step.args[0]} "
        "is not supported; commands run as the sandbox's root"
      )
    elif step.kind in ("run", "exec"):
      if files:
        await sandbox.upload(files)
        files = {}
      await _run(sandbox, task, step, workdir, settings, installs)
      ran = True
  if files:
    await sandbox.upload(files)
  if installs:
    missing = await _missing(sandbox)
    if missing:
      raise MissingTool(task.name, missing)
    await sandbox.exec(["rm", "-rf", TOOLS])
  if ran:
    await sandbox.seal()
  workdir = task.config.workdir or workdir
  settings.update(task.config.environment_env)
  if ran or settings or workdir != _DEFAULT_WORKDIR:
    await sandbox.configure(workdir, settings)


def installers(
  commands: Mapping[str, str] = _COMMANDS,
) -> dict[str, base.FileSpec]:
  """The stand-ins for installers, to be uploaded and put first on PATH."""
  program = (_INSTALLER.encode(), 0o755)
  names = ("apt", "apt-get", "apt-cache", "pip", "pip3", "apt-key")
  files: dict[str, base.FileSpec] = {f"{TOOLS}/{n}": program for n in names}
  files[f"{TOOLS}/commands.json"] = json.dumps(commands).encode()
  return files


async def _run(
  sandbox: LocalSandbox,
  task: Task,
  step: dockerfile.Step,
  workdir: str,
  settings: Mapping[str, str],
  installs: bool,
) -> None:
  argv = list(step.args)
  if step.kind == "run":
    argv = ["/bin/sh", "-c", step.args[0]]
  # Every step starts afresh: the working directory and the variables so far.
  path = settings.get("PATH", sandbox.default_path)
  own = {"PATH": f"{TOOLS}:{path}"} if installs else {}
  result = await sandbox.exec(
    argv,
    timeout_sec=task.config.build_timeout_sec,
    cwd=workdir,
    env={**settings, **own},
  )
  if result.exit_code != 0:
    last = " / ".join(result.text.strip().splitlines()[-3:]) or "no output"
    why = (
      "ran out of time"
      if result.timed_out
      else (f"exited with {result.exit_code} ({result.outcome})")
    )
    missing = await _missing(sandbox)
    if missing:
      raise MissingTool(task.name, missing)
    if any(word in result.text for word in _NO_NETWORK):
      why, last = "needs the network, which a sandbox has not", last[-200:]
    raise base.SandboxError(
      f"task {task.name}: Dockerfile line {step.line}: RUN {why}: {last}"
    )


async def _missing(sandbox: LocalSandbox) -> tuple[str, ...]:
  listed = await sandbox.exec(["cat", f"{TOOLS}/missing"])
  if listed.exit_code != 0:
    return ()
  return tuple(dict.fromkeys(listed.text.splitlines()))
