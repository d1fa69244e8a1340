"""An agent that breaks its machine has failed; it is never our failure."""

import time

import pytest

from t1jax.rewards.verifier import read_pytest, verify
from t1jax.sandbox import base
from t1jax.sandbox.farm import Farm
from t1jax.tasks.task import Task, TaskConfig

# Reads as a careful verifier does: no link, no pipe, no endless file.
VERIFY = b"""
import json, os
try:
  fd = os.open("/app/answer", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  passed = os.read(fd, 100) == b"42\\n"
except OSError:
  passed = False
tests = [{"name": "answer", "status": "passed" if passed else "failed"}]
with open("/logs/verifier/ctrf.json", "w") as file:
  json.dump({"results": {"tests": tests}}, file)
"""


def make_task(test_sh, **fields):
  return Task(
    name="example",
    instruction="Write 42 to answer.\n",
    environment={
      "Dockerfile": b"FROM x\nWORKDIR /app\nCOPY given /app/\n",
      "given": b"given\n",
    },
    tests={"test.sh": test_sh, "verify.py": VERIFY},
    config=TaskConfig(verifier_timeout_sec=20.0),
    **fields,
  )


TASK = make_task(b"exec python3 -I -S /tests/verify.py\n")


@pytest.fixture
def break_it(in_sandbox):
  """Runs a command as the agent, a look at the rest, then the verifier."""

  def run(command, task=TASK, limits=None):
    async def whole(sandbox):
      await sandbox.upload({"/app/given": b"given\n"})
      await sandbox.exec(command, timeout_sec=10)
      after = await sandbox.exec("echo alive", timeout_sec=5)
      verdict = await verify(sandbox, task)
      again = await sandbox.exec("echo alive", timeout_sec=5)
      return verdict, after, again

    return in_sandbox(whole, limits)

  return run


def _python(lines):
  return f"exec python3 -I -S - <<'END'\nimport os, sys\n{lines}\nEND\n"


# Each name at the top (and those that the verifier makes) becomes another
# thing, whatever it was, as far as the kernel lets it.
_REPLACE = """
os.mkdir("/var/old")
for name in [*os.listdir("/"), "tests", "logs", "verifier", "conftest.py"]:
  try:
    os.rename("/" + name, "/var/old/" + name)
  except OSError:
    pass
  try:
    %s
  except OSError:
    pass
"""
_MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
while True:
  block = libc.shmat(libc.shmget(0, 8 << 20, 0o1777), None, 0)
  ctypes.memset(block, 1, 8 << 20)
"""
DAMAGE = {
  "everything moved away": "mv given /*",
  "one link at a time": (
    "mkdir /x; for n in /*; do [ $n = /x ] || mv $n /x/; done"
  ),
  "programs removed": (
    "rm -rf /bin /lib /lib64 /sbin /opt /etc /tmp /root /var /srv /home /app"
  ),
  "files for all": _python(_REPLACE % 'open("/" + name, "w").close()'),
  "pipes for all": _python(_REPLACE % 'os.mkfifo("/" + name)'),
  "links for all": _python(
    _REPLACE % 'os.symlink("/var/old/" + name, "/" + name)'
  ),
  "links to nothing": _python(_REPLACE % 'os.symlink("/gone", "/" + name)'),
  "links to themselves": _python(_REPLACE % 'os.symlink(name, "/" + name)'),
  "directories for all": _python(_REPLACE % 'os.mkdir("/" + name)'),
  "another python": (
    "mv /opt /opt2; mkdir -p /opt/python/bin /usr/local/bin; "
    "printf '#!/bin/sh\\n' | tee /opt/python/bin/python3 "
    "/usr/local/bin/python3; chmod +x /opt/python/bin/* /usr/local/bin/*"
  ),
  "names that are no text": _python(
    "for name in [b'a' * 255, b'\\xff\\xfe', b'a\\nb', b'-rf', b' ', b'*',"
    " b'a\\\\040b']:\n  os.mkdir(b'/' + name)\n"
    "  os.mkdir(b'/opt/' + name)\n  os.symlink(name, b'/l' + name[:250])\n"
  ),
  "thousands of names at the top": _python(
    "for i in range(5000):\n  os.mkdir(f'/d{i}')\n  open(f'/f{i}', 'w').close()"
  ),
  "disk full": "cat /dev/zero > /app/more; cat /dev/zero > /dev/shm/more",
  "no process left": (
    "python3 -c 'import os, time\nfor i in range(64):\n  if not os.fork(): "
    "time.sleep(100)' > /dev/null 2>&1"
  ),
  "stopped processes that ignore all": (
    "for i in 1 2 3; do setsid sh -c 'trap \"\" TERM HUP INT; kill -STOP $$' &"
    " done > /dev/null 2>&1"
  ),
  "memory that outlives its process": _python(_MEMORY),
  "memory and disk": "cat /dev/zero > /app/more; " + _python(_MEMORY),
  "no permission": "chmod 000 / /app /app/* /opt /etc /tmp /root",
  "a directory of the root": "cd /; mv app a; ln -s / app",
  "a directory of the kernel": "cd /; mv app a; ln -s /proc app",
  "a directory that is here": "cd /; mv app a; ln -s /proc/self/cwd app",
  "a deep tree": _python(
    "for i in range(3000):\n  os.mkdir('d' * 20); os.chdir('d' * 20)"
  ),
  "a working directory that is a lie": "PWD=$(printf %0200000d 1)",
  "huge files with nothing in them": "truncate -s 1T answer given",
  "a socket": _python(
    "import socket\nfor path in ('/app/answer', '/socket'):\n"
    "  socket.socket(socket.AF_UNIX).bind(path)"
  ),
  "a pipe": "mkfifo answer",
  "an endless file": "ln -s /dev/zero answer",
  "a removed working directory": "mkdir d; cd d; rm -rf /app",
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_a_broken_machine_is_a_failure_with_a_verdict(break_it, name):
  verdict, after, again = break_it(
    DAMAGE[name], limits=base.Limits(memory_mb=128, disk_mb=32)
  )
  assert not verdict.infra and not verdict.strict, verdict
  assert [a.passed for a in verdict.assertions] == [False], verdict
  for result in (after, again):  # a result, whether or not a shell is left
    assert result.exit_code in (0, 126, 127, 254), result
    assert result.text.endswith("alive\n") or "cannot start" in result.text


@pytest.mark.parametrize(
  "command",
  [
    "true",
    "mv /opt /var",
    "mv /opt /var; ln -s /tmp /opt",
    "mv /opt /var; mkfifo /opt",
    "mv /opt /var; mkdir -p /opt/tools; echo forged > /opt/tools/one",
    "echo forged > /opt/tools/one; rm -rf /opt; chmod 000 /opt",
    "mkdir /opt/mine; echo mine > /opt/mine/x; rm /lib* /bin",
  ],
)
def test_what_is_bound_is_bound_for_the_verifier_too(loop, tmp_path, command):
  (tmp_path / "one").write_text("1\n")
  task = make_task(
    b"cp /opt/tools/one /logs/verifier/reward.txt; "
    b"cat /opt/file; cat /opt/mine/x 2> /dev/null; true\n"
  )
  binds = {"/opt/tools": str(tmp_path), "/opt/file": str(tmp_path / "one")}

  async def main():
    async with Farm(max_sandboxes=1, binds=binds) as farm:
      async with farm.sandbox() as sandbox:
        await sandbox.exec(command)
        return await verify(sandbox, task)

  verdict = loop.run(main())
  assert verdict.strict and verdict.reward_file == 1.0, verdict
  assert verdict.output == b"1\n" + b"mine\n" * ("mine" in command)


def test_a_task_done_before_the_machine_broke_is_done(break_it):
  verdict, after, _ = break_it(
    "echo 42 > answer; mv /opt /etc /srv; rm /bin /lib /lib64 /sbin"
  )
  assert after.exit_code == 127
  assert verdict.strict and not verdict.infra


# Verifiers that trust what they look at, as public ones do.
TRUSTING = {
  "an endless file": (
    b"test -e /app/answer && python3 -c 'open(\"/app/answer\").read()'",
    "ln -s /dev/zero answer",
  ),
  "no working directory": (b'[ "$PWD" = / ] && exit 1', "cd /; rm -rf /app"),
  "no place for scratch files": (b"mktemp -d || exit 1", "rm -r /tmp"),
  "a program that sounds like ours": (
    b"test -e /app/run && { sh /app/run || exit 1; }",
    "echo 'echo uvx: command not found; exit 1' > run",
  ),
}


@pytest.mark.parametrize("name", list(TRUSTING))
def test_no_result_is_ours_only_if_there_is_none_without_the_agent(
  break_it, name
):
  look, command = TRUSTING[name]
  script = look + b"\n[ $? -lt 100 ] || exit 1\n"
  script += b"echo 0 > /logs/verifier/reward.txt\n"
  small = base.Limits(memory_mb=128, disk_mb=32)
  verdict, _, _ = break_it(command, make_task(script), small)
  assert not verdict.infra and not verdict.strict, verdict
  assert "no agent has been" in verdict.error
  # The same damage under a verifier that cannot work anywhere.
  broken, _, _ = break_it(command, make_task(b"exit 1\n"), small)
  assert broken.infra


@pytest.mark.parametrize(
  "text",
  [
    "==== short test summary info ====\nFAILED " + "::a[x]" * 100_000 + " x",
    "==== short test summary info ====\nFAILED a::b[" + "]" * 500_000 + "x",
    "==== short test summary info ====\nFAILED a" + "::a" * 100_000 + " x",
    "= 1" + " a in b =" * 100_000 + "x",
    "= 1 " + " in " * 100_000 + "x",
    "::a" * 300_000 + " x",
  ],
)
def test_no_output_makes_reading_it_slow(text):
  started = time.process_time()
  assert read_pytest(text) == {}
  assert time.process_time() - started < 3
