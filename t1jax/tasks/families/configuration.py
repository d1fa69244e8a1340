"""Text configuration: a value that stands elsewhere, a file named inside."""

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

_PORT = (
  "Set the port in {service}.ini to the value that ports.txt gives.",
  "ports.txt lists the port of {service}. Correct {service}.ini.",
  "{service}.ini has a wrong port. Take the right one from ports.txt.",
  "Change the port of {service} in {service}.ini to the one in ports.txt.",
)
_FLAG = (
  "Flip {flag} in the file that {main}.ini includes.",
  "{main}.ini includes another file. Flip {flag} there.",
  "Switch {flag} over, in the file which {main}.ini includes.",
)


def _set_port(rng: np.random.Generator) -> Draft:
  *services, owner = words(rng, 11)
  drawn = numbers(rng, 14)
  ports, old, stale = drawn[:10], drawn[10], drawn[11:]
  service, new = services[0], ports[0]
  rows = [f"{s} {p}" for s, p in zip(services, ports)]
  files = {
    "ports.txt": lines(*(rows[i] for i in rng.permutation(10))),
    f"{service}.ini": lines(f"port={old}", f"size={stale[2]}", f"user={owner}"),
    f"{services[1]}.ini": lines(f"port={stale[0]}", f"user={owner}"),
    f"{services[2]}.ini": lines(f"port={stale[1]}", f"user={owner}"),
  }
  fixed = f"port={new}\nsize={stale[2]}\nuser={owner}"
  kept = sorted(set(files) - {f"{service}.ini"})
  ini = f"{service}.ini"
  return Draft(
    instruction=pick(rng, _PORT).format(service=service),
    files=files,
    oracle=(
      f"grep {service} ports.txt",
      f"grep port {ini}",
      f"sed -i s/{old}/{new}/ {ini}",
      f"cat {ini}",
    ),
    checks=(
      Check("old_port_gone", "semantic", f"'port={old}' not in text({ini!r})"),
      Check("new_port_set", "semantic", f"'port={new}' in text({ini!r})"),
      Check(
        "other_keys_kept",
        "hygiene",
        f"text({ini!r}).endswith('\\nsize={stale[2]}\\nuser={owner}')",
      ),
      Check("other_files_unchanged", "hygiene", f"unchanged(*{kept!r})"),
      Check("final_text", "gate", f"text({ini!r}) == {fixed!r}"),
    ),
    slots={"service": service, "old": old, "new": new},
    # The old port need not be known: sed can match any. The best guesser
    # knows it, so that only the new one is left to find.
    choices={"old": (old,), "new": tuple(ports)},
  )


def _toggle_flag(rng: np.random.Generator) -> Draft:
  main, flag, *rest = words(rng, 12)
  parts, others = rest[:6], rest[6:8]
  part = parts[0]
  files = {f"{main}.ini": lines(f"include={part}.ini")}
  before = pick(rng, ("on", "off"))
  after = "off" if before == "on" else "on"
  for name in parts:
    value = before if name == part else pick(rng, ("on", "off"))
    second = pick(rng, ("on", "off"))
    files[f"{name}.ini"] = lines(f"{flag}={value}", f"{others[0]}={second}")
  ini = f"{part}.ini"
  tail = files[ini].decode().split("\n")[1]
  fixed = f"{flag}={after}\n{tail}"
  kept = sorted(set(files) - {ini})
  return Draft(
    instruction=pick(rng, _FLAG).format(main=main, flag=flag),
    files=files,
    oracle=(
      f"cat {main}.ini",
      f"cat {ini}",
      f"sed -i s/{flag}={before}/{flag}={after}/ {ini}",
      f"grep {flag} {ini}",
    ),
    checks=(
      Check(
        "old_value_gone", "semantic", f"'{flag}={before}' not in text({ini!r})"
      ),
      Check("new_value_set", "semantic", f"'{flag}={after}' in text({ini!r})"),
      Check("other_flag_kept", "hygiene", f"text({ini!r}).endswith({tail!r})"),
      Check("other_files_unchanged", "hygiene", f"unchanged(*{kept!r})"),
      Check("final_text", "gate", f"text({ini!r}) == {fixed!r}"),
    ),
    slots={
      "main": main,
      "flag": flag,
      "part": part,
      "before": before,
      "after": after,
    },
    # `before` as if it were known: sed can match any value.
    choices={
      "part": tuple(parts),
      "before": (before,),
      "after": ("on", "off"),
    },
  )


FAMILIES = (
  Family("set_port", "text_configuration", _set_port),
  Family("toggle_flag", "text_configuration", _toggle_flag),
)
