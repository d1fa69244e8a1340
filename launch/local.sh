#!/usr/bin/env bash
# Installs t1jax and runs the main job on this machine.
#
#   bash launch/local.sh                                  # the whole job
#   bash launch/local.sh --config=configs/tiny.py:smoke --workdir=runs/smoke
#   bash launch/local.sh --config.seed=1 --workdir=runs/seed1
#
# Arguments go to `python -m t1jax.train`, after these defaults, which they
# override:
#   --config=configs/tiny.py   the experiment; ":name" picks a variant of it
#   --workdir=runs/tiny        the run directory; the same command resumes
# `--config.FIELD=VALUE` sets one field of the config.
#
# The first run makes a virtual environment and installs into it (a minute or
# two); later runs start at once, unless setup.py changed.
#
# Environment:
#   PYTHON   interpreter for a new environment (default: python3.11, or else
#            any newer Python 3)
#   VENV     where the environment lives (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source-path=SCRIPTDIR source=environment.sh
source launch/environment.sh

if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
  print_help launch/local.sh
  exit 0
fi

install_package
exec "$VENV/bin/python" -m t1jax.train \
  --config=configs/tiny.py --workdir=runs/tiny "$@"
