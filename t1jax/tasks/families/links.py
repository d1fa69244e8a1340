"""Links: find the symbolic link that leads nowhere, and mend it."""

import numpy as np

from t1jax.tasks.families.base import (
  Check,
  Draft,
  Family,
  lines,
  pick,
  words,
)

_BROKEN = (
  "One link here is broken. Point it to the file in {folder} that names it.",
  "Find the broken link and point it to the file in {folder} naming it.",
  "Mend the broken link: its target is the file in {folder} that names it.",
  "A link leads nowhere. Point it to the file in {folder} that mentions it.",
)
# What a link leads to may be spelt in several ways.
_LEADS = "os.path.realpath({link!r}) == os.path.realpath({target!r})".format


def _broken_link(rng: np.random.Generator) -> Draft:
  folder, other, *rest = words(rng, 27)
  links, names, texts = rest[:8], rest[8:16], rest[16:]
  link, target = links[0], f"{folder}/{names[0]}"
  # A link is called like the file that it leads to; the broken one's file
  # has got another name. The other folder names each link too, elsewhere:
  # which file is right is seen only in the folder that was asked for.
  shift = int(rng.integers(1, 8))
  files = {f"{folder}/{name}": lines(texts[8]) for name in links[1:]}
  for i, name in enumerate(names):
    files[f"{folder}/{name}"] = lines(f"{texts[i]} {links[i]}")
    files[f"{other}/{name}"] = lines(links[(i + shift) % 8])
  intact = [_LEADS(link=n, target=f"{folder}/{n}") for n in sorted(links[1:])]
  return Draft(
    instruction=pick(rng, _BROKEN).format(folder=folder),
    files=files,
    # One process makes all links, the broken one too.
    setup=" ".join(["ln -s", *(f"{folder}/{n}" for n in sorted(links)), "."]),
    oracle=(
      "find . -xtype l",
      f"grep -l {link} {folder}/*",
      f"ln -sf {target} {link}",
      f"cat {link}",
    ),
    checks=(
      Check("link_is_a_link", "hygiene", f"os.path.islink({link!r})"),
      Check("link_leads_somewhere", "semantic", f"os.path.exists({link!r})"),
      Check("link_leads_there", "semantic", _LEADS(link=link, target=target)),
      Check("other_links_kept", "hygiene", " and ".join(intact)),
      Check("files_unchanged", "hygiene", f"unchanged(*{sorted(files)!r})"),
      Check(
        "final_state",
        "gate",
        f"names() == {sorted([*links, folder, other])!r}"
        f" and os.path.islink({link!r})"
        f" and os.readlink({link!r}).endswith({target!r})",
      ),
    ),
    slots={"folder": folder, "link": link, "target": names[0]},
    choices={"link": tuple(links), "target": tuple(names)},
  )


broken_link = Family("broken_link", "links", _broken_link)
FAMILIES = (broken_link,)
