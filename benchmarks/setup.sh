#!/usr/bin/env bash
# Makes .venv-bench: the packages of this repository, the pinned peers, and the benchmarks' own helper package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-bench
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    echo '*' >"$venv/.gitignore"
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt)
"${pip[@]}" torch setuptools wheel numpy
"${pip[@]}" -r benchmarks/requirements.txt
"${pip[@]}" --no-build-isolation -e ./mtb_core -e ./mtb_ddp -e ./plugins/mtb_data -e ./plugins/mtb_evidence -e ./plugins/mtb_launcher -e ./plugins/mtb_sinks -e ./benchmarks/mtb_bench
"$venv/bin/python" -c 'import accelerate, lightning, torch; print("torch", torch.__version__, "accelerate", accelerate.__version__, "lightning", lightning.__version__)'
