"""Archives: find the one that holds a file, extract it, remove it."""

import io
import tarfile

import numpy as np

from t1jax.tasks.families.base import (
  Check,
  Draft,
  Family,
  lines,
  pick,
  words,
)

_EXTRACT = (
  "Extract {key}.txt from the archive that holds it, then delete the archive.",
  "One archive holds {key}.txt. Extract the file and delete that archive.",
  "Find the archive with {key}.txt, extract the file, remove the archive.",
  "Which archive has {key}.txt? Unpack it here and delete the archive.",
)
_EMPTY_BLOCKS = b"\0" * 1024


def _archive(name: str, content: bytes) -> bytes:
  """A tar archive of one file: the same bytes everywhere.

  The owner is root and the date fixed (but not 1970, which makes tar warn).
  What tarfile pads to a whole tape record is cut to the two empty blocks
  that end an archive.
  """
  member = tarfile.TarInfo(name)
  member.size, member.mtime = len(content), 1_700_000_000
  stream = io.BytesIO()
  with tarfile.open(
    fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT
  ) as tar:
    tar.addfile(member, io.BytesIO(content))
  return stream.getvalue().rstrip(b"\0").ljust(1024, b"\0") + _EMPTY_BLOCKS


def _extract_from(rng: np.random.Generator) -> Draft:
  key, word, *rest = words(rng, 25)
  # An archive that is *called* by the key holds another file, and one whose
  # file only mentions the key: neither the name nor `grep key` is enough.
  archives = [f"{name}.tar" for name in (*rest[:11], key)]
  members = [key, *rest[11:22]]
  texts = [word, key, *[rest[22]] * 10]
  files = {
    archive: _archive(f"{member}.txt", lines(text))
    for archive, member, text in zip(archives, members, texts, strict=True)
  }
  archive, name = archives[0], f"{key}.txt"
  kept = sorted(set(archives) - {archive})
  return Draft(
    instruction=pick(rng, _EXTRACT).format(key=key),
    files=files,
    oracle=(
      f"grep -l {name} *",
      f"tar xf {archive}",
      f"rm {archive}",
      f"cat {name}",
    ),
    checks=(
      Check("file_extracted", "semantic", f"exists({name!r})"),
      Check("file_is_right", "semantic", f"text({name!r}) == {word!r}"),
      Check("archive_deleted", "semantic", f"not exists({archive!r})"),
      Check("other_archives_unchanged", "hygiene", f"unchanged(*{kept!r})"),
      Check("final_names", "gate", f"names() == {sorted([*kept, name])!r}"),
    ),
    slots={"key": key, "archive": archive},
    choices={"archive": tuple(archives)},
  )


extract_from = Family("extract_from", "archives", _extract_from)
FAMILIES = (extract_from,)
