"""Many at once, nothing left behind, and errors that a person can act on."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from t1jax.sandbox import base, cgroups, local, template
from t1jax.sandbox import farm as farm_lib
from t1jax.sandbox.farm import Farm

REPOSITORY = pathlib.Path(farm_lib.__file__).parents[2]
# An interpreter that an ordinary user can run too; the sandbox needs no
# package.
PYTHON = (
  "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else (sys.executable)
)


def run_program(body, run_directory, python=sys.executable):
  """Runs a program that may import the sandbox, in a process of its own."""
  lines = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
  return subprocess.run(
    [python, "-I", "-B", "-c", lines + textwrap.dedent(body)],
    capture_output=True,
    text=True,
    timeout=60,
    env={"T1JAX_RUN_DIR": str(run_directory), "PATH": os.defpath},
  )


def test_commands_of_many_sandboxes_are_not_mixed_up(loop, farm):
  async def one(index):
    async with farm.sandbox() as sandbox:
      await sandbox.exec(f"export NONCE=n{index}; cd /tmp")
      await sandbox.upload({"/tmp/nonce": f"f{index}".encode()})
      result = await sandbox.exec("echo $NONCE $(cat nonce) $PWD")
      return result.text == f"n{index} f{index} /tmp\n"

  async def all_of_them():
    return await asyncio.gather(*(one(i) for i in range(12)))

  assert all(loop.run(all_of_them()))


def test_no_more_than_asked_for_are_alive():
  async def main():
    alive, most = 0, 0

    async def one(farm):
      nonlocal alive, most
      async with farm.sandbox() as sandbox:
        alive += 1
        most = max(most, alive)
        await sandbox.exec("true")
        alive -= 1

    async with Farm(max_sandboxes=2) as farm:
      await asyncio.gather(*(one(farm) for _ in range(6)))
      return most, farm.directory

  most, directory = asyncio.run(main())
  assert most == 2
  assert not os.path.exists(directory)


def test_limits_differ_between_sandboxes(loop, farm):
  async def main():
    sizes = []
    for disk_mb in (8, 32, 8):
      async with farm.sandbox(base.Limits(disk_mb=disk_mb)) as sandbox:
        shown = await sandbox.exec("df -m /dev/shm | tail -1 | tr -s ' '")
        sizes.append(int(shown.text.split()[1]))
    return sizes

  assert loop.run(main()) == [8, 32, 8]


def test_sandboxes_of_different_disks_come_and_go():
  # Spares with another disk are thrown away, some before they have booted.
  async def one(farm, index):
    disk_mb = 64 + 64 * (index % 3 == 2)
    async with farm.sandbox(base.Limits(disk_mb=disk_mb)) as sandbox:
      return (await sandbox.exec("echo $((6 * 7))")).output

  async def main():
    for _ in range(3):
      async with Farm(max_sandboxes=8) as farm:
        said = await asyncio.gather(*(one(farm, i) for i in range(9)))
        assert said == [b"42\n"] * 9

  asyncio.run(asyncio.wait_for(main(), 60))


def test_a_killed_zygote_ends_its_sandboxes_and_is_replaced():
  async def main():
    async with Farm(max_sandboxes=2) as farm:
      async with farm.sandbox() as sandbox:
        running = asyncio.create_task(sandbox.exec("sleep 100"))
        await asyncio.sleep(0.1)
        farm._process.kill()
        with pytest.raises(base.SandboxDied, match="start another one"):
          await running
        with pytest.raises(base.SandboxDied):
          await sandbox.exec("true")
      async with farm.sandbox() as sandbox:
        return (await sandbox.exec("echo back")).text

  assert asyncio.run(main()) == "back\n"


def test_an_init_that_hangs_is_ended_by_the_farm(monkeypatch):
  monkeypatch.setattr(local, "_LEAVE_SEC", 0.2)
  monkeypatch.setattr(local, "_GRACE_SEC", 0.2)

  async def main():
    async with Farm(max_sandboxes=2) as farm:
      async with farm.sandbox() as sandbox:
        for pid in _children(farm._process.pid):
          os.kill(pid, signal.SIGSTOP)
        with pytest.raises(base.SandboxDied, match="did not answer"):
          await sandbox.exec("true", timeout_sec=0.1)
      for pid in _children(farm._process.pid):  # those that waited for a user
        os.kill(pid, signal.SIGCONT)
      async with farm.sandbox() as sandbox:
        return (await sandbox.exec("echo back")).text

  started = time.monotonic()
  assert asyncio.run(main()) == "back\n"
  assert time.monotonic() - started < 20


def test_every_call_in_flight_ends_when_the_zygote_is_killed():
  async def main():
    async with Farm(max_sandboxes=8) as farm:

      async def one():
        async with farm.sandbox() as sandbox:
          up.append(sandbox)
          await sandbox.exec("sleep 100", timeout_sec=100)

      up = []
      calls = [asyncio.create_task(one()) for _ in range(8)]
      while len(up) < 8:
        await asyncio.sleep(0.01)
      farm._process.kill()
      ends = await asyncio.wait_for(
        asyncio.gather(*calls, return_exceptions=True), 20
      )
      assert all(isinstance(end, base.SandboxDied) for end in ends), ends
      async with farm.sandbox() as sandbox:
        return (await sandbox.exec("echo back")).text

  assert asyncio.run(main()) == "back\n"


def test_cancelled_anywhere_nothing_is_left():
  async def episode(farm):
    async with farm.sandbox() as sandbox:
      await sandbox.exec("sleep 100 & echo hi")
      await sandbox.upload({"/app/big": bytes(2_000_000)})
      await sandbox.open_verifier()
      await sandbox.close_verifier()

  def held(farm):
    pids = [os.getpid(), farm._process.pid]
    files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    mounts = [
      len(pathlib.Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
      for pid in pids
    ]
    tasks, children = len(asyncio.all_tasks()), _children(pids[1])
    return files, mounts, tasks, len(children), len(farm._gone)

  async def main():
    async with Farm(max_sandboxes=2) as farm:
      await episode(farm)
      before = held(farm)
      for turns in range(0, 120, 3):  # of the event loop, then of the clock
        task = asyncio.create_task(episode(farm))
        for _ in range(min(turns, 60)):
          await asyncio.sleep(0)
        if turns > 60:
          await asyncio.sleep((turns - 60) / 1000)
        task.cancel()
        if turns % 2:
          await asyncio.sleep(0)
          task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.done()
      await episode(farm)  # what was cancelled last has left, too
      give_up = time.monotonic() + 10
      while held(farm) != before and time.monotonic() < give_up:
        await asyncio.sleep(0.05)
      return before, held(farm)

  before, after = asyncio.run(main())
  assert before == after


def _children(parent):
  found = []
  for entry in pathlib.Path("/proc").iterdir():
    try:
      fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
      if int(fields[1]) == parent:
        found.append(int(entry.name))
    except (OSError, ValueError, IndexError):
      continue
  return found


def _processes_named(word):
  found = []
  for entry in pathlib.Path("/proc").iterdir():
    try:
      if word in (entry / "cmdline").read_bytes():
        found.append(int(entry.name))
    except (OSError, ValueError):
      continue
  return found


def test_kill_dash_nine_leaves_nothing_once_the_next_farm_has_started(
  tmp_path, monkeypatch
):
  marker = f"sleep 7{os.getpid()}"
  body = f"""
  import asyncio
  from t1jax.sandbox.farm import Farm
  async def main():
    async with Farm() as farm:
      async with farm.sandbox() as one, farm.sandbox() as two:
        for sandbox in (one, two):
          await sandbox.exec("setsid {marker} & exec setsid {marker} &")
        print("up", flush=True)
        await asyncio.sleep(100)
  asyncio.run(main())
  """
  lines = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
  victim = subprocess.Popen(
    [sys.executable, "-I", "-B", "-c", lines + textwrap.dedent(body)],
    stdout=subprocess.PIPE,
    env={"T1JAX_RUN_DIR": str(tmp_path), "PATH": os.defpath},
  )
  assert victim.stdout.readline() == b"up\n"
  asleep = marker.replace(" ", "\0").encode()
  give_up = time.monotonic() + 20  # the shells have only begun to start them
  while len(_processes_named(asleep)) < 4 and time.monotonic() < give_up:
    time.sleep(0.05)
  assert len(_processes_named(asleep)) == 4
  victim.kill()
  victim.wait()
  victim.stdout.close()
  monkeypatch.setenv("T1JAX_RUN_DIR", str(tmp_path))

  async def main():
    async with Farm() as farm:
      mine = os.path.basename(farm.directory)
      assert _processes_named(asleep) == []
      assert os.listdir(tmp_path) == [mine]
      assert all(not o.startswith(f"{victim.pid}-") for o in cgroups.owners())

  asyncio.run(main())
  assert os.listdir(tmp_path) == []
  assert str(tmp_path) not in pathlib.Path("/proc/self/mountinfo").read_text()


def test_sweep_spares_the_living_and_kills_what_is_left(tmp_path, monkeypatch):
  monkeypatch.setenv("T1JAX_RUN_DIR", str(tmp_path))
  own = f"{os.getpid()}-{farm_lib._start_time(os.getpid())}-0"
  # As if our process id had been another process' before.
  reused = f"{os.getpid()}-1-0"
  for name in (own, reused, "unrelated"):
    (tmp_path / name).mkdir()
  with subprocess.Popen(["sleep", "100"]) as orphan:
    started = farm_lib._start_time(orphan.pid)
    (tmp_path / reused / "zygote").write_text(f"{orphan.pid} {started}")
    assert reused in farm_lib.sweep()
    assert orphan.wait(10) == -signal.SIGKILL
  assert sorted(os.listdir(tmp_path)) == sorted([own, "unrelated"])


def test_an_ordinary_user_gets_sandboxes(tmp_path):
  if os.geteuid() != 0:
    pytest.skip("this is what all the other tests do here")
  tmp_path.chmod(0o777)
  for parent in tmp_path.parents:
    if not os.stat(parent).st_mode & 1 and str(parent) != "/":
      parent.chmod(0o711)
  done = run_program(
    """
    import asyncio, os, sys
    os.setgroups([]); os.setgid(54321); os.setuid(54321)
    from t1jax.sandbox.base import Limits, SandboxUnavailable
    from t1jax.sandbox.farm import Farm
    async def main():
      limits = Limits(memory_mb=100, processes=16, disk_mb=16)
      async with Farm() as farm, farm.sandbox(limits) as sandbox:
        print(farm.root, (await sandbox.exec("id -u; pwd")).output)
        for command in (
          "python3 -c 'bytearray(1 << 30)'", "mount -t tmpfs none /mnt",
          "cat /proc/1/environ", "head -c 20M /dev/zero > x",
        ):
          result = await sandbox.exec(command)
          print(result.exit_code != 0, result.outcome)
        await sandbox.open_verifier()
    try:
      asyncio.run(main())
    except SandboxUnavailable as error:
      print("unavailable", error)
    """,
    tmp_path / "run",
    PYTHON,
  )
  if done.stdout.startswith("unavailable"):
    pytest.skip(done.stdout)
  assert done.stdout.splitlines() == [
    r"False b'0\n/app\n'", "True memory", "True ok", "True ok", "True disk",
  ], done.stderr  # fmt: skip


UNAVAILABLE = """
import asyncio
from t1jax.sandbox import base, farm, kernel
{setup}
async def main():
  async with farm.Farm(): pass
try:
  asyncio.run(main())
except base.SandboxError as error:
  print(type(error).__name__, error)
"""


def test_no_namespaces_is_one_line_with_the_setting_to_change(tmp_path):
  setup = """
import os
uid, gid = os.getuid(), os.getgid()
from t1jax.sandbox import stage
kernel.unshare(kernel.CLONE_NEWUSER, "user")
stage.write_maps("/proc/self", f"0 {uid} 1", f"0 {gid} 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
"""
  done = run_program(UNAVAILABLE.format(setup=setup), tmp_path)
  if "unshare" in done.stderr:
    pytest.skip(f"no user namespace to try it in: {done.stderr}")
  assert done.stdout.startswith("SandboxUnavailable this machine cannot make")
  assert "sysctl -w user.max_user_namespaces=10000" in done.stdout
  assert done.stdout.count("\n") == 1 and not done.stderr


def test_a_full_disk_is_one_line_with_the_directory(tmp_path):
  if os.geteuid() != 0:
    pytest.skip("only root can mount a small disk here")
  setup = f"""
kernel.unshare(kernel.CLONE_NEWNS, "mount")
kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
kernel.mount("tmpfs", {str(tmp_path)!r}, "tmpfs", 0, "size=16k")
"""
  done = run_program(UNAVAILABLE.format(setup=setup), tmp_path)
  assert done.stdout.startswith("DiskFull"), done.stderr
  assert str(tmp_path) in done.stdout and "T1JAX_RUN_DIR" in done.stdout
  assert done.stdout.count("\n") == 1 and not done.stderr


def test_another_users_run_directory_is_refused(tmp_path):
  if os.geteuid() != 0:
    pytest.skip("only root can give a directory away")
  os.chown(tmp_path, 54321, 54321)
  done = run_program(UNAVAILABLE.format(setup=""), tmp_path)
  assert "it belongs to another user" in done.stdout, done.stderr


@pytest.mark.parametrize(
  "settings, code, words",
  [
    ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, 13, "AppArmor"),
    ({"kernel/unprivileged_userns_clone": "0"}, 1, "userns_clone=1"),
    ({}, 1, "seccomp"),
    ({}, 28, "max_*_namespaces"),
    ({}, 38, "Linux 5.11"),
  ],
)  # fmt: skip
def test_each_refusal_has_its_fix(monkeypatch, settings, code, words):
  monkeypatch.setattr(farm_lib, "_setting", settings.get)
  text = farm_lib.explain("unshare user: no", code)
  assert words in text and "unshare user: no" in text and "\n" not in text


def test_binds_are_read_only_and_checked(tmp_path):
  (tmp_path / "file").write_text("shown")

  async def main():
    async with Farm(binds={"/opt/shown": str(tmp_path)}) as farm:
      async with farm.sandbox() as sandbox:
        result = await sandbox.exec("cat /opt/shown/file; touch /opt/shown/x")
        assert result.text.startswith("shown") and "Read-only" in result.text
        await sandbox.open_verifier()
        listed = await sandbox.exec_verifier(
          ["/bin/ls", "/opt/shown"],
          timeout_sec=10, cwd="/", env={}, output_bytes=1000,
        )  # fmt: skip
        assert listed.output == b"file\n"

  asyncio.run(main())
  for binds in ({"/usr/x": str(tmp_path)}, {"/opt/x": str(tmp_path / "no")}):
    with pytest.raises(ValueError, match="below /opt and an existing"):
      Farm(binds=binds)


def test_a_python_from_elsewhere_is_found_inside(monkeypatch):
  prefix = {template.PYTHON_PREFIX: sys.base_prefix}
  monkeypatch.setattr(template, "python_bind", lambda: prefix)
  look = "import json, sys; print(sys.prefix, len(json.dumps([])))"

  async def main():
    async with Farm() as farm, farm.sandbox() as sandbox:
      run = await sandbox.exec(["/opt/python/bin/python3", "-c", look])
      path = await sandbox.exec("echo $PATH; ls -a /root; touch /opt/python/x")
      await sandbox.open_verifier()
      checked = await sandbox.exec_verifier(
        ["/bin/sh", "-c", f"exec /opt/python/bin/python3 -c '{look}'"],
        timeout_sec=10, cwd="/", env={}, output_bytes=1000,
      )  # fmt: skip
      return run.text, path.text, checked.text

  run, path, checked = asyncio.run(main())
  assert run == checked == "/opt/python 2\n"
  assert path.splitlines()[0].endswith(":/opt/python/bin")
  assert "pyenv" not in path and "Read-only" in path


def test_a_farm_stays_small_and_starts_fast():
  started = time.monotonic()

  async def main():
    async with Farm() as farm:
      took = time.monotonic() - started
      status = pathlib.Path(f"/proc/{farm._process.pid}/status").read_text()
      resident = status.partition("VmRSS:")[2].split()[0]
      return took, int(resident) / 1024, "jax" in sys.modules

  took, resident_mb, _ = asyncio.run(main())
  assert took < 10 and resident_mb < 40
