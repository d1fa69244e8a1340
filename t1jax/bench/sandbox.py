"""Many sandboxes at once: speed, isolation, and what a kill leaves behind.

    python -m t1jax.bench.sandbox [--sandboxes=64]

One JSON line. Alone (`boot_ms`, `exec_ms` of a `cat`, `close_ms`,
`boot_exec_close_ms`, `verify_overhead_ms`) sandboxes follow one another on an
otherwise idle farm; with all alive at once every command prints its own
sandbox's nonce (`mixed_up` counts those that print another's). Then a process
with as many sandboxes, each running a daemon that left its session, is killed
with SIGKILL; once the next farm has started, whatever is left of it is
counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Awaitable

from t1jax.sandbox import base, cgroups
from t1jax.sandbox.farm import Farm, run_directory
from t1jax.sandbox.local import LocalSandbox


def percentile(values: list[float], share: float) -> float:
  """Nearest-rank percentile, in milliseconds from seconds."""
  ordered = sorted(values)
  return round(
    1e3 * ordered[min(len(ordered) - 1, int(share * len(values)))], 2
  )


async def timed(times: list[float], call: Awaitable[object]) -> None:
  """Awaits a call and notes its seconds."""
  started = time.perf_counter()
  await call
  times.append(time.perf_counter() - started)


async def empty_verification(sandbox: LocalSandbox) -> None:
  """All that a verification adds to the tests' own time."""
  await sandbox.open_verifier()
  await sandbox.upload({"/tests/test.sh": b"true\n"}, view="verifier")
  await sandbox.kill_all()
  await sandbox.close_verifier()


async def alone(farm: Farm, rounds: int) -> dict[str, float]:
  """Latencies of one sandbox after the other."""
  boots: list[float] = []
  execs: list[float] = []
  closes: list[float] = []
  wholes: list[float] = []
  views: list[float] = []
  for _ in range(rounds):
    started = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
      sandbox = await stack.enter_async_context(farm.sandbox())
      boots.append(time.perf_counter() - started)
      await timed(execs, sandbox.exec("cat /etc/hostname"))
      closing = time.perf_counter()
    closes.append(time.perf_counter() - closing)
    wholes.append(time.perf_counter() - started)
  async with farm.sandbox() as sandbox:
    for _ in range(rounds):
      await timed(views, empty_verification(sandbox))
  return {
    "boot_ms_p50": percentile(boots, 0.5),
    "boot_ms_p95": percentile(boots, 0.95),
    "exec_ms_p50": percentile(execs, 0.5),
    "exec_ms_p95": percentile(execs, 0.95),
    "close_ms_p50": percentile(closes, 0.5),
    "close_ms_p95": percentile(closes, 0.95),
    "boot_exec_close_ms_p50": percentile(wholes, 0.5),
    "verify_overhead_ms_p50": percentile(views, 0.5),
  }


async def at_once(farm: Farm, count: int, rounds: int) -> dict[str, float]:
  """All sandboxes alive together, each asked for its nonce again and again."""
  boots: list[float] = []
  execs: list[float] = []
  wrong = alive = 0
  everyone = asyncio.Barrier(count)

  async def one() -> None:
    nonlocal wrong, alive
    nonce = secrets.token_hex(8)
    started = time.perf_counter()
    async with farm.sandbox() as sandbox:
      boots.append(time.perf_counter() - started)
      await sandbox.upload({"/app/nonce": nonce.encode()})
      await sandbox.exec(f"export NONCE={nonce}")
      alive += 1
      await everyone.wait()
      for turn in range(rounds):
        asked = time.perf_counter()
        result = await sandbox.exec(f"echo $NONCE {turn}; cat nonce")
        execs.append(time.perf_counter() - asked)
        wrong += result.text != f"{nonce} {turn}\n{nonce}"
      await everyone.wait()

  started = time.perf_counter()
  await asyncio.gather(*(one() for _ in range(count)))
  seconds = time.perf_counter() - started
  return {
    "alive": alive,
    "mixed_up": wrong,
    "at_once_boot_ms_p50": percentile(boots, 0.5),
    "at_once_boot_ms_p95": percentile(boots, 0.95),
    "at_once_exec_ms_p50": percentile(execs, 0.5),
    "at_once_exec_ms_p95": percentile(execs, 0.95),
    "at_once_seconds": round(seconds, 2),
  }


async def victim(count: int) -> None:
  """A process to be killed: boots sandboxes with daemons, and waits."""
  async with Farm(max_sandboxes=count) as farm:
    async with contextlib.AsyncExitStack() as stack:
      for _ in range(count):
        sandbox = await stack.enter_async_context(farm.sandbox())
        await sandbox.exec("setsid sleep 1000 > /dev/null 2>&1 &")
      print(farm.directory, flush=True)
      await asyncio.sleep(1000)


def processes() -> dict[int, tuple[int, str, str]]:
  """pid -> (parent, start time, mount namespace) of all that can be seen."""
  found = {}
  for name in os.listdir("/proc"):
    with contextlib.suppress(OSError, ValueError, IndexError):
      with open(f"/proc/{int(name)}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
      if fields[0] == b"Z":
        continue
      namespace = ""
      with contextlib.suppress(OSError):
        namespace = os.readlink(f"/proc/{name}/ns/mnt")
      found[int(name)] = (int(fields[1]), fields[19].decode(), namespace)
  return found


def ticks_since_boot() -> int:
  """Now, on the clock of processes' start times."""
  return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def descendants(of: int) -> dict[int, tuple[int, str, str]]:
  """The processes below one, as `processes` has them."""
  everyone = processes()

  def below(pid: int) -> bool:
    while pid in everyone and pid != of:
      pid = everyone[pid][0]
    return pid == of

  return {p: v for p, v in everyone.items() if p != of and below(p)}


async def after_a_kill(count: int) -> dict[str, int]:
  """Kills a process with sandboxes; counts what the next farm leaves."""
  child = subprocess.Popen(
    [sys.executable, "-m", __spec__.name, f"--sandboxes={count}", "--victim"],
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert child.stdout is not None
    directory = child.stdout.readline().strip()
    family = descendants(child.pid)
    killed_at = ticks_since_boot()
  finally:
    child.kill()
    child.wait()
  owner = os.path.basename(directory)
  own = processes()[os.getpid()][2]
  foreign = {value[2] for value in family.values()} - {own, ""}
  async with Farm(max_sandboxes=1):
    left = processes()
    # Whoever started later may hold a new namespace with a dead one's number.
    held = {v[2] for v in left.values() if int(v[1]) <= killed_at}
    mounts = held & foreign
    with open("/proc/self/mountinfo") as file:
      mounts |= {line for line in file if directory in line}
    return {
      "killed_processes": len(family),
      "leaked_processes": sum(
        pid in left and left[pid][1] == value[1]
        for pid, value in family.items()
      ),
      "leaked_mounts": len(mounts),
      "leaked_directories": sum(
        owner in names for names in (os.listdir(run_directory()),
                                     cgroups.owners())
      ),
    }  # fmt: skip


async def measure(count: int, rounds: int) -> dict[str, float]:
  """All figures."""
  async with Farm(max_sandboxes=count) as farm:
    figures: dict[str, float] = {"root": int(farm.root)}
    figures |= await alone(farm, rounds)
    figures |= await at_once(farm, count, 5)
  return figures | await after_a_kill(count)


def main() -> None:
  """Entry point."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--sandboxes", type=int, default=64, help="at once (%(default)s)"
  )
  parser.add_argument(
    "--rounds", type=int, default=50, help="of each latency (%(default)s)"
  )
  parser.add_argument("--victim", action="store_true", help=argparse.SUPPRESS)
  options = parser.parse_args()
  try:
    if options.victim:
      asyncio.run(victim(options.sandboxes))
    print(json.dumps(asyncio.run(measure(options.sandboxes, options.rounds))))
  except base.SandboxError as error:
    sys.exit(str(error))


if __name__ == "__main__":
  main()
