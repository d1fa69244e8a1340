#!/usr/bin/env bash
# Installs t1jax with what its tests need, then checks style and runs them.
#
#   bash launch/test.sh                          # everything
#   bash launch/test.sh tests/rl                 # one room's tests
#   bash launch/test.sh -n 0 -k gae              # any pytest arguments
#
# Arguments go to pytest. Tests run in two processes unless `-n` says otherwise.
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
  print_help launch/test.sh
  exit 0
fi

install_package test
if ! "$VENV/bin/ruff" check . || ! "$VENV/bin/ruff" format --check .; then
  echo "style: no test was run; $VENV/bin/ruff format mends most of it" >&2
  exit 1
fi
exec "$VENV/bin/python" -m pytest -n 2 "$@"
