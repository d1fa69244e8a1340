"""System administration: a failed service to restart, a job to disable."""

import numpy as np

from t1jax.tasks.families.base import (
  Check,
  Draft,
  Family,
  lines,
  numbers,
  pick,
  words,
)

_RESTART = (
  "A service failed in {log}.log. Append restart NAME PORT to queue.txt; "
  "ports.txt has the ports.",
  "{log}.log shows one ERROR. Add restart NAME PORT for it to queue.txt; "
  "see ports.txt.",
  "Find the failed service in {log}.log and its port in ports.txt; append "
  "restart NAME PORT to queue.txt.",
  "Queue the service that failed in {log}.log: append restart NAME PORT to "
  "queue.txt, ports are in ports.txt.",
)
_DISABLE = (
  "Disable the job of {owner} by owners.txt: delete its line in cron.txt.",
  "{owner} left. Delete from cron.txt the job that {owner} has in owners.txt.",
  "Stop the job that {owner} has in owners.txt: remove its line from cron.txt.",
  "owners.txt says which job {owner} runs. Delete that job from cron.txt.",
)


def _restart_failed(rng: np.random.Generator) -> Draft:
  log, other, *services = words(rng, 11)
  ports = dict(zip(services, numbers(rng, 9), strict=True))
  name, misled, queued = services[:3]
  row = f"restart {name} {ports[name]}"
  waiting = f"restart {queued} {ports[queued]}"

  def history(failed: str) -> bytes:
    """Eight services: one failed, three only warn, the others are well."""
    rest = [n for n in services if n not in (failed, queued)]
    rows = [f"ERROR {failed} failed"]
    rows += [f"WARN {n} slow" for n in rest[-3:]]
    rows += [f"INFO {n} ok" for n in rest[:-3]]
    return lines(*(rows[i] for i in rng.permutation(len(rows))))

  files = {
    f"{log}.log": history(name),
    # Another machine's log: its failed service is not the one asked for.
    f"{other}.log": history(misled),
    "ports.txt": lines(
      *(f"{services[i]} {ports[services[i]]}" for i in rng.permutation(9))
    ),
    "queue.txt": lines(waiting),
  }
  kept = sorted(set(files) - {"queue.txt"})
  return Draft(
    instruction=pick(rng, _RESTART).format(log=log),
    files=files,
    oracle=(
      f"grep ERROR {log}.log",
      f"grep {name} ports.txt",
      f"echo {row} >> queue.txt",
    ),
    checks=(
      Check(
        "restart_is_queued",
        "semantic",
        f"{row!r} in text('queue.txt').split('\\n')",
      ),
      Check(
        "one_line_added",
        "semantic",
        "len(text('queue.txt').split('\\n')) == 2",
      ),
      Check(
        "queued_before_is_kept",
        "hygiene",
        f"text('queue.txt').split('\\n')[0] == {waiting!r}",
      ),
      Check("other_files_unchanged", "hygiene", f"unchanged(*{kept!r})"),
      Check(
        "final_state",
        "gate",
        f"text('queue.txt') == {waiting!r} + '\\n' + {row!r}"
        f" and names() == {sorted(files)!r}",
      ),
    ),
    slots={"log": log, "name": name, "port": ports[name]},
    choices={"name": tuple(services), "port": tuple(ports.values())},
  )


def _disable_job(rng: np.random.Generator) -> Draft:
  # Eight jobs have no owner in the list, and neither list has an order.
  names = words(rng, 24)
  owners, jobs = names[:8], names[8:]
  owner, job = owners[0], jobs[0]
  minutes = numbers(rng, len(jobs))
  rows = [f"{minute} {job}" for minute, job in zip(minutes, jobs, strict=True)]
  cron = [rows[i] for i in rng.permutation(len(rows))]
  line = cron.index(rows[0])
  after = cron[:line] + cron[line + 1 :]
  files = {
    "cron.txt": lines(*cron),
    "owners.txt": lines(
      *(f"{owners[i]} {jobs[i]}" for i in rng.permutation(len(owners)))
    ),
  }
  return Draft(
    instruction=pick(rng, _DISABLE).format(owner=owner),
    files=files,
    oracle=(
      f"grep {owner} owners.txt",
      f"grep -n {job} cron.txt",
      f"sed -i {line + 1}d cron.txt",
    ),
    checks=(
      Check(
        "job_is_gone",
        "semantic",
        f"exists('cron.txt') and {job!r} not in text('cron.txt')",
      ),
      Check(
        "one_line_less",
        "semantic",
        f"len(text('cron.txt').split('\\n')) == {len(after)}",
      ),
      Check(
        "other_jobs_kept",
        "hygiene",
        f"set(text('cron.txt').split('\\n')) >= set({after!r})",
      ),
      Check("owners_unchanged", "hygiene", "unchanged('owners.txt')"),
      Check(
        "final_state",
        "gate",
        f"text('cron.txt').split('\\n') == {after!r}"
        f" and names() == {sorted(files)!r}",
      ),
    ),
    slots={"owner": owner, "job": job, "line": str(line + 1)},
    choices={
      "job": tuple(jobs),
      "line": tuple(str(i + 1) for i in range(len(rows))),
    },
  )


restart_failed = Family("restart_failed", "system", _restart_failed)
disable_job = Family("disable_job", "system", _disable_job)
FAMILIES = (restart_failed, disable_job)
