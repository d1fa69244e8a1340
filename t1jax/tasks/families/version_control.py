"""Version control: find a branch by its commit, merge it, delete it."""

import hashlib
from collections.abc import Mapping

import numpy as np

from t1jax.tasks.families.base import (
  Check,
  Draft,
  Family,
  pick,
  words,
)

_MERGE = (
  "Merge the branch whose commit mentions {key} into main, then delete it.",
  "Find the branch with the {key} commit, merge it into main and delete it.",
  "One branch has a commit about {key}. Merge it into main and delete it.",
  "Which branch did the work on {key}? Merge it into main and delete it.",
)
_README = "readme.txt"
# A fixed identity and date: the same commits, hence the same hashes, on every
# machine, and the verifier knows them without running git.
_PERSON = "t1jax <t1jax@localhost> 1700000000 +0000"

# Read with the standard library: the verifier may not start processes. A
# branch lives in a file of its own until someone packs the references.
_REFERENCES = """\
folder, found = '.git/refs/heads', {}
if exists('.git/packed-refs'):
  for row in text('.git/packed-refs').split('\\n'):
    commit, _, name = row.partition(' refs/heads/')
    if name:
      found[name] = commit
found.update((name, text(f'{folder}/{name}')) for name in names(folder))
"""
_MERGED = (
  _REFERENCES
  + """\
if found['main'] == TIP:
  return True
import zlib
commit = found['main']
commit = zlib.decompress(read(f'.git/objects/{commit[:2]}/{commit[2:]}'))
return ('parent ' + TIP).encode() in commit.split(b'\\n')
"""
)


def _hash(kind: str, content: bytes) -> str:
  """Git's name of an object: the SHA-1 of its header and content."""
  return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()


def _commit(files: Mapping[str, str], parent: str, subject: str) -> str:
  """The hash that git gives to a commit of these files (flat, no folders)."""
  rows = b""
  for name in sorted(files):
    blob = _hash("blob", files[name].encode())
    rows += f"100644 {name}\0".encode() + bytes.fromhex(blob)
  text = f"tree {_hash('tree', rows)}\n"
  text += f"parent {parent}\n" if parent else ""
  text += f"author {_PERSON}\ncommitter {_PERSON}\n\n{subject}\n"
  return _hash("commit", text.encode())


def _stream(branch: str, start: str, subject: str, name: str, text: str) -> str:
  """One commit on a new branch in the language of `git fast-import`."""
  rows = [f"commit refs/heads/{branch}", f"committer {_PERSON}"]
  rows += [f"data {len(subject) + 1}", subject]
  rows += [f"from {start}"] if start else []
  rows += [f"M 100644 inline {name}", f"data {len(text)}", text]
  return "\n".join(rows)


def _merge_branch(rng: np.random.Generator) -> Draft:
  key, *rest = words(rng, 31)
  # A branch that is *called* by the key works on something else.
  branches = [*rest[:9], key]
  topics = [key, *rest[9:18]]
  names = [f"{name}.txt" for name in rest[18:28]]
  start, word = rest[28:30]
  branch, name = branches[0], names[0]
  main = {_README: f"{start}\n"}
  root = _commit(main, "", f"add {start}")
  tip = _commit({**main, name: f"{word}\n"}, root, f"add {key}")
  stream = [_stream("main", "", f"add {start}", _README, main[_README])]
  for i in map(int, rng.permutation(len(branches))):
    subject = f"add {topics[i]}"
    stream.append(
      _stream(branches[i], "refs/heads/main", subject, names[i], f"{word}\n")
    )
  # fast-import makes all commits in one process; a commit of its own costs
  # about 10 ms. No template: it would copy a dozen hooks.
  setup = "\n".join(
    [
      "git init -q -b main --template= .",
      "printf '[user]\\nname=t1jax\\nemail=t1jax@localhost\\n' >> .git/config",
      "git fast-import --quiet <<'STREAM'",
      *stream,
      "STREAM",
      "git reset -q --hard",
    ]
  )
  kept = sorted(set(branches) - {branch})
  return Draft(
    instruction=pick(rng, _MERGE).format(key=key),
    files={},
    setup=setup,
    oracle=(
      f"git log --all --grep {key} --format=%D",
      f"git merge -q {branch}",
      f"git branch -qd {branch}",
    ),
    checks=(
      Check(
        "main_has_the_commit", "semantic", _MERGED.replace("TIP", repr(tip))
      ),
      Check("file_is_here", "semantic", f"text({name!r}) == {word!r}"),
      Check(
        "branch_is_deleted",
        "semantic",
        _REFERENCES + f"return {branch!r} not in found",
      ),
      Check("readme_unchanged", "hygiene", f"text({_README!r}) == {start!r}"),
      Check(
        "other_branches_kept",
        "hygiene",
        _REFERENCES + f"return found.keys() >= set({kept!r})",
      ),
      Check(
        "final_state",
        "gate",
        _REFERENCES
        + f"return (sorted(found) == {sorted([*kept, 'main'])!r}"
        + " and text('.git/HEAD') == 'ref: refs/heads/main'"
        + f" and tree() == { ({_README: start, name: word})!r})",
      ),
    ),
    slots={"key": key, "branch": branch},
    choices={"branch": tuple(branches)},
  )


merge_branch = Family("merge_branch", "version_control", _merge_branch)
FAMILIES = (merge_branch,)
