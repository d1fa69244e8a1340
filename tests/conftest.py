"""Strict rules for every test, set before anything imports JAX.

Environment variables, not jax.config: most rooms' tests never import JAX and
must not pay for it.
"""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
_CACHE = pathlib.Path(
  os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
)
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(_CACHE / "t1jax" / "jax-tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
