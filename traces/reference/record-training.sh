#!/usr/bin/env bash
# Records rung 6 on a machine with two GPUs: one process a run, or two, as a reader would type it.
# Usage: traces/reference/record-training.sh FOLDER [PYTHON]   FOLDER gets 06_training/<tag>.json.gz and .txt
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?usage: record-training.sh FOLDER [PYTHON]}
python=${2:-python}

while read -r flags; do
  echo "== $flags"
  launch=()
  case $flags in *--parallel*) launch=(-m torch.distributed.run --nproc-per-node 2) ;; esac
  # The flags are words of this list, to be split.
  # shellcheck disable=SC2086
  "$python" "${launch[@]}" $flags --out "$folder" </dev/null
done <<'RUNS'
06_training.py --layers 4 --warmup --parallel ddp
06_training.py --layers 4 --warmup --parallel ddp --bucket-mb 10000
06_training.py --layers 4 --warmup --parallel ddp --slow 1
06_training.py --layers 4 --warmup --parallel fsdp
06_training.py --layers 4 --warmup
06_training.py --layers 4 --warmup --for-loop
06_training.py --layers 4 --warmup --fused
06_training.py --layers 4 --warmup --checkpoint
06_training.py --layers 4 --warmup --compile
06_training.py --layers 4 --warmup --loader 5 --workers 0
06_training.py --layers 4 --warmup --active 1 --profile-memory
RUNS
gzip -9 -n -f "$folder"/06_training/*.json
