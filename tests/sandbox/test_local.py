"""What a command can see and do, and how it ends."""

import asyncio
import os
import platform
import struct
import time

import pytest

from t1jax.sandbox import base, seccomp


def test_nothing_of_the_host_is_visible(in_sandbox):
  async def test(sandbox):
    top = await sandbox.exec("ls -A /; ls -A /root /home /app /opt")
    assert not {"work", "tmp/t1jax-0", ".dockerenv"} & set(top.text.split())
    secrets = await sandbox.exec(
      "ls /etc/shadow /etc/gitconfig /etc/ssh /etc/ssl/private"
    )
    assert secrets.text.count("No such file") == 4
    # Init is a fork of a process with host paths in its arguments.
    cmdline = await sandbox.exec("tr '\\0' ' ' < /proc/1/cmdline; env")
    assert os.path.dirname(base.__file__) not in cmdline.text
    assert "zygote" not in cmdline.text
    mounts = await sandbox.exec("cat /proc/self/mountinfo")
    assert os.getcwd() not in mounts.text

  in_sandbox(test)


@pytest.mark.parametrize(
  "forbidden",
  [
    "ls /proc/1/root/",
    "cat /proc/1/environ",
    "mount -t tmpfs none /mnt",
    "unshare --user --map-root-user true",
    "echo 1 > /proc/sys/vm/drop_caches",
    "echo x > /proc/sys/kernel/core_pattern",
    "echo 1 > /proc/sys/kernel/shmall",
    "mknod /tmp/disk b 8 0",
    "date -s 2000-01-01",
    "ip link add dummy0 type dummy",
    "renice 19 1",
    "taskset -p 1 1",
    "chrt --idle -p 0 1",
    "kill -9 1 && sleep 0.2 && kill -0 1 && false",
    "mount -o remount,rw /dev && touch /dev/x",
  ],
)
def test_no_right_over_the_machine_or_init(in_sandbox, forbidden):
  async def test(sandbox):
    result = await sandbox.exec(forbidden)
    assert result.exit_code != 0
    assert (await sandbox.exec("echo alive")).output == b"alive\n"

  in_sandbox(test)


def test_a_command_holds_no_file_of_inits(in_sandbox):
  # With the channel it could answer the caller in init's place.
  async def test(sandbox):
    for _ in range(2):
      listed = await sandbox.exec("readlink /proc/self/fd/*")
      kinds = [line.split(":")[0] for line in listed.text.split()]
      assert kinds[0] == "/dev/null" and kinds[1:3] == ["pipe", "pipe"]
      assert "socket" not in kinds and "anon_inode" not in kinds, kinds
    await sandbox.open_verifier()
    listed = await sandbox.exec_verifier(
      ["/bin/sh", "-c", "readlink /proc/self/fd/*"],
      timeout_sec=5, cwd="/", env={"PATH": sandbox.default_path},
      output_bytes=10_000,
    )  # fmt: skip
    assert len(listed.text.split()) == 3 and "socket" not in listed.text

  in_sandbox(test)


_CALLS = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
limit = ctypes.create_string_buffer(16)
assert libc.syscall(%d, 1, 7, limit, 0) < 0, "limits of init"
for family in (socket.AF_VSOCK,):
  try:
    socket.socket(family, socket.SOCK_STREAM)
  except OSError:
    continue
  raise SystemExit("a socket to the machine's host")
for number in %r:
  assert libc.syscall(number, 0, 0, 0, 0, 0) < 0, number
  assert ctypes.get_errno() == 38, number
"""


def test_calls_that_no_namespace_confines_are_refused(in_sandbox, farm):
  if platform.machine() != "x86_64" or not farm.root:
    pytest.skip("numbers of x86-64; an ordinary user has one group only")
  program = _CALLS % (302, seccomp._MACHINES["x86_64"][2])

  async def test(sandbox):
    await sandbox.upload({"/app/calls.py": program.encode()})
    result = await sandbox.exec("python3 -I -S calls.py")
    assert result.exit_code == 0, result.text
    groups = await sandbox.exec("cat /proc/self/cgroup")
    assert "t1jax" not in groups.text

  in_sandbox(test)


def test_the_filter_is_whole_on_every_machine_it_knows():
  for machine in seccomp._MACHINES:
    code = seccomp.program(machine)
    steps = [
      struct.unpack_from("HBBI", code, i) for i in range(0, len(code), 8)
    ]
    for index, (_, yes, no, _) in enumerate(steps):
      assert index + 1 + max(yes, no) < len(steps) or steps[index][0] == 6
  assert seccomp.program("pdp11") == b""


def test_users_and_files_look_ordinary(in_sandbox, farm):
  async def test(sandbox):
    assert (await sandbox.exec("id -u; pwd")).output == b"0\n/app\n"
    shell = "echo a > /dev/null && head -c 4 /dev/zero | wc -c && tty; which"
    result = await sandbox.exec(shell + " python3 bash git")
    assert result.text.count("/usr/bin/") >= 2, result
    if farm.root:
      change = "chown 1000:1000 . && stat -c %u . && ls -ld /usr/bin"
      result = await sandbox.exec(change)
      assert result.text.startswith("1000\n") and " root root " in result.text

  in_sandbox(test)


def test_working_directory_variables_and_functions_carry_over(in_sandbox):
  async def test(sandbox):
    first = r"""cd /tmp; export A=$'two\nlines "and" quotes' B=1
    greet() { echo "hello $1"; }; C=2; exit 3"""
    assert (await sandbox.exec(first)).exit_code == 3
    second = await sandbox.exec('pwd; echo "$A"; greet you; echo "[$C]"')
    assert second.text == '/tmp\ntwo\nlines "and" quotes\nhello you\n[]\n'
    await sandbox.exec("unset B; unset -f greet")
    third = await sandbox.exec("echo [$B]; greet")
    assert third.text == "[]\nbash: line 1: greet: command not found\n" or (
      third.text == "[]\nbash: greet: command not found\n"
    )
    # Given for one call, they act as an export and a cd before it.
    fourth = await sandbox.exec("pwd; echo $D", cwd="/usr", env={"D": "a 'b"})
    assert fourth.text == "/usr\na 'b\n"

  in_sandbox(test)


@pytest.mark.parametrize(
  "command",
  [
    "PWD=$(printf %0200000d 1)",
    "unset PWD",
    "mkdir $'/tmp/a\\nb\\n'; cd $'/tmp/a\\nb\\n'",
    "mkdir /tmp/d; cd /tmp/d; rm -r /tmp/d",
    "set -eu; false",
    "exec 1>&- 2>&- 62>&-",
    "head -c 3M /dev/zero >&62",
    "printf 'x\\0y\\0z\\0' >&62",
    "readonly PATH PWD HOME; export -n PATH",
    "a-b.c() { echo odd; }; builtin() { :; }; trap() { :; }; unset() { :; }",
    "export BASH_ENV=/x SHELLOPTS; set -n",
    "export BIG=$(head -c 1000000 /dev/zero | tr '\\0' x)",
    "export BIG=$(head -c 2000000 /dev/zero | tr '\\0' x)",
    "trap 'sleep 100' EXIT",
    "kill -9 $PPID; kill -9 -1; kill -STOP 1; kill -9 1",
    "ulimit -n 0; ulimit -u 0; ulimit -f 0",
  ],
)
def test_no_state_of_a_shell_makes_the_next_one_fail(in_sandbox, command):
  async def test(sandbox):
    started = time.monotonic()
    await sandbox.exec(command, timeout_sec=1.0)
    after = await sandbox.exec("echo $((40 + 2))", timeout_sec=5.0)
    assert after.exit_code == 0 and after.text.endswith("42\n"), after
    assert time.monotonic() - started < 10

  in_sandbox(test)


def test_a_lie_about_the_working_directory_is_not_believed(in_sandbox):
  async def test(sandbox):
    await sandbox.exec("mkdir /tmp/here; cd /tmp/here; PWD=/elsewhere")
    return (await sandbox.exec("pwd")).text

  assert in_sandbox(test) == "/tmp/here\n"


def test_a_request_that_cannot_be_met_is_an_error_and_no_end(in_sandbox):
  async def test(sandbox):
    with pytest.raises(base.SandboxError, match="null"):
      await sandbox.upload({"/app/a\0b": b""})
    with pytest.raises(base.SandboxError, match="null"):
      await sandbox.download("/a\0b")
    await sandbox.configure("/app", {"A": "b\0c"})
    assert (await sandbox.exec("true")).exit_code == 127
    await sandbox.configure("/app", {"A": "b"})
    assert (await sandbox.exec("echo $A")).text == "b\n"

  in_sandbox(test)


def test_a_killed_or_replaced_shell_changes_nothing(in_sandbox):
  async def test(sandbox):
    await sandbox.exec("cd /tmp; export A=1")
    assert (await sandbox.exec("cd /; kill -9 $$")).exit_code == 137
    assert (await sandbox.exec("cd /; exec true")).exit_code == 0
    assert (await sandbox.exec("pwd; echo $A")).text == "/tmp\n1\n"
    await sandbox.exec("mkdir x; cd x; rmdir ../x")
    gone = await sandbox.exec("pwd")
    assert gone.text == "bash: /tmp/x: No such file or directory\n/\n"

  in_sandbox(test)


def test_commands_cannot_read_the_callers_input(in_sandbox):
  async def test(sandbox):
    result = await sandbox.exec("cat; read x; echo $?", timeout_sec=5)
    assert result.output == b"1\n"

  in_sandbox(test)


@pytest.mark.parametrize(
  "command, exit_code, output",
  [
    (b"printf '\\377\\000\\n'", 0, b"\xff\x00\n"),
    (b"echo a\0b", 0, b"ab\n"),
    ("-x", 127, None),
    ("if then", 2, None),
    ("echo \ud83d", 0, None),
    ("", 0, b""),
    (["printf", "%s|", "a b", "$HOME"], 0, b"a b|$HOME|"),
    ("echo " + "x" * 200_000 + " | wc -c", 0, b"200001\n"),
    ("kill -TERM $$", 143, b""),
  ],
)
def test_any_command_is_run_as_it_stands(
  in_sandbox, command, exit_code, output
):
  async def test(sandbox):
    result = await sandbox.exec(command)
    assert result.exit_code == exit_code, result
    assert output is None or result.output == output

  in_sandbox(test)


def test_long_output_keeps_head_and_tail_and_says_what_is_gone(in_sandbox):
  async def test(sandbox):
    result = await sandbox.exec("seq 100000")
    whole = "".join(f"{i}\n" for i in range(1, 100001))
    gap = f"\n[... {result.dropped_bytes} bytes omitted ...]\n"
    head, tail = result.text.split(gap)
    assert len(head) == len(tail) == 500
    assert whole.startswith(head) and whole.endswith(tail)
    assert result.dropped_bytes == len(whole) - 1000

  in_sandbox(test, base.Limits(output_bytes=1000))


def test_a_daemon_that_holds_stdout_does_not_hang_the_command(in_sandbox):
  async def test(sandbox):
    started = time.monotonic()
    daemon = "(while sleep 0.02; do echo tick; done; touch /app/died) & echo up"
    result = await sandbox.exec(daemon, timeout_sec=20)
    assert result.output.startswith(b"up") and result.outcome == "ok"
    assert time.monotonic() - started < 10
    # It goes on, and its output is taken rather than refused.
    await asyncio.sleep(0.3)
    check = await sandbox.exec("ls /app; ps ax | grep -c 'slee[p]'")
    assert "died" not in check.text and check.text.strip() != "0"
    assert await sandbox.kill_all() >= 1
    assert "sleep" not in (await sandbox.exec("ps ax")).text

  in_sandbox(test)


def test_timeout_ends_the_command_and_all_it_started(in_sandbox):
  async def test(sandbox):
    await sandbox.exec("sleep 1000 & disown")  # another command's: stays
    escape = """trap '' TERM INT HUP
    setsid sh -c 'while :; do date +%N > /app/clock; done' &
    (setsid sleep 2001 &) ; sleep 2002"""
    result = await sandbox.exec(escape, timeout_sec=0.5)
    assert result.timed_out and result.outcome == "timeout"
    assert result.timeout_sec == 0.5 and result.exit_code == 137
    listing = (await sandbox.exec("ps axo args")).text
    assert "sleep 1000" in listing
    assert "sleep 200" not in listing and "date" not in listing
    first = await sandbox.exec("cat clock; sleep 0.1; cat clock")
    lines = first.text.split()
    assert len(lines) < 2 or lines[0] == lines[1]

  in_sandbox(test)


def test_a_fork_bomb_is_contained(in_sandbox):
  async def test(sandbox):
    bomb = "b() { b | b & }; b; sleep 1000"
    result = await sandbox.exec(bomb, timeout_sec=1.0)
    assert result.outcome == "timeout"
    assert (await sandbox.exec("echo alive")).output == b"alive\n"
    assert len((await sandbox.exec("ps ax")).text.splitlines()) <= 5

  in_sandbox(test, base.Limits(processes=24))


def test_a_bomb_left_behind_leaves_no_room_and_says_so(in_sandbox):
  async def test(sandbox):
    command = "for i in 1 2 3 4 5 6; do sleep 100 & done 2>/dev/null"
    await sandbox.exec(command, timeout_sec=1.0)
    await sandbox.exec("sleep 100 & sleep 100 & sleep 100 &", timeout_sec=1.0)
    result = await sandbox.exec("(true); (true)", timeout_sec=0.5)
    assert result.outcome in ("processes", "timeout")
    await sandbox.kill_all()
    assert (await sandbox.exec("(echo room)")).output == b"room\n"

  in_sandbox(test, base.Limits(processes=8))


def test_memory_limit_has_a_name(in_sandbox):
  async def test(sandbox):
    result = await sandbox.exec("python3 -c 'x = bytearray(1 << 30)'")
    assert result.exit_code != 0 and result.outcome == "memory"
    assert (await sandbox.exec("echo alive")).output == b"alive\n"

  in_sandbox(test, base.Limits(memory_mb=64, disk_mb=16))


def test_disk_limit_has_a_name_and_is_the_sandboxs_own(in_sandbox):
  async def test(sandbox):
    result = await sandbox.exec("head -c 20M /dev/zero > big")
    assert result.outcome == "disk" and b"No space left" in result.output
    with pytest.raises(base.DiskFull, match=r"16 MiB is full.*disk_mb"):
      await sandbox.upload({"/app/more": b"x" * 100_000})
    everywhere = "for d in /usr /tmp /dev/shm /var; do echo x > $d/x; done"
    assert (await sandbox.exec(everywhere)).text.count("No space left") == 4
    # Tests can still be put in place and run.
    await sandbox.open_verifier()
    await sandbox.upload({"/tests/x": b"x" * 100_000}, view="verifier")
    await sandbox.close_verifier()
    assert (await sandbox.exec("rm big; echo y > y")).outcome == "ok"

  in_sandbox(test, base.Limits(disk_mb=16))


def test_loopback_is_up_and_nothing_else_is_there(in_sandbox):
  async def test(sandbox):
    program = """import socket
server = socket.create_server(("127.0.0.1", 8000))
socket.create_connection(("127.0.0.1", 8000)).sendall(b"x")
print(server.accept()[0].recv(1))
try:
  socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError as error:
  print(error.strerror)"""
    await sandbox.upload({"/app/net.py": program.encode()})
    result = await sandbox.exec("python3 net.py; ls /sys/class/net; hostname")
    assert "b'x'\nNetwork is unreachable" in result.text
    assert result.text.endswith("sandbox\n")

  in_sandbox(test)


def test_lower_directories_can_be_renamed_and_removed(in_sandbox, farm):
  if not farm.root:
    pytest.skip("system directories are read-only for an ordinary user")

  async def test(sandbox):
    rename = "import os; os.rename('/usr/share/doc', '/usr/share/old')"
    await sandbox.upload({"/app/rename.py": rename.encode()})
    result = await sandbox.exec(
      "python3 rename.py && touch /usr/lib/x && test ! -e /usr/share/doc && "
      "ls /usr/share/old | head -1 && rm -r /usr/share/perl && echo removed"
    )
    assert result.exit_code == 0 and result.text.endswith("removed\n"), result
    # The host's own are untouched.
    assert os.path.isdir("/usr/share/doc") and not os.path.exists("/usr/lib/x")

  in_sandbox(test)


def test_files_go_in_and_come_out(in_sandbox):
  async def test(sandbox):
    blob = os.urandom(3_000_000)
    await sandbox.upload({
      "/app/deep/er/blob": blob,
      "relative.sh": (b"echo ran", 0o755),
    })  # fmt: skip
    assert await sandbox.download("/app/deep/er/blob", 1 << 22) == blob
    assert (await sandbox.exec("./relative.sh")).output == b"ran\n"
    with pytest.raises(base.SandboxError, match="3000000 bytes, more than"):
      await sandbox.download("/app/deep/er/blob", 1000)
    await sandbox.exec("mkfifo pipe; ln -s /etc/passwd link; mkdir d")
    with pytest.raises(base.SandboxError, match="not a regular file"):
      await sandbox.download("/app/pipe")
    with pytest.raises(base.SandboxError, match="No such file"):
      await sandbox.download("/app/none")
    # A link or a pipe in the way is replaced: nothing is written through it.
    await sandbox.upload({"/app/link": b"new", "/app/pipe": b"new"})
    assert await sandbox.download("/app/link") == b"new"
    assert b"root:x:0:0" in await sandbox.download("/etc/passwd")
    with pytest.raises(base.SandboxError, match="directory"):
      await sandbox.upload({"/app/d": b"new"})

  in_sandbox(test)


def test_a_cancelled_command_is_killed_and_the_channel_stays_in_step(
  in_sandbox,
):
  async def test(sandbox):
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(sandbox.exec("sleep 100", timeout_sec=200), 0.3)
    result = await sandbox.exec("ps axo args; echo next")
    assert result.output.endswith(b"next\n") and b"sleep 100" not in (
      result.output.replace(b"ps axo args; echo next", b"")
    )

  in_sandbox(test)


def test_two_callers_take_turns(in_sandbox):
  async def test(sandbox):
    results = await asyncio.gather(
      *(sandbox.exec(f"sleep 0.0{i % 3}; echo {i}") for i in range(12))
    )
    assert [r.text.strip() for r in results] == [str(i) for i in range(12)]

  in_sandbox(test)


@pytest.mark.parametrize("field", ["memory_mb", "processes", "output_bytes"])
def test_limits_are_checked(field):
  with pytest.raises(ValueError, match=rf"Limits\.{field} = 0: expected"):
    base.Limits(**{field: 0})
