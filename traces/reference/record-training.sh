#!/usr/bin/env bash
# Records rung 6 on a machine with two GPUs, as a reader would type it: on both, and then on one each, two runs at a time.
# Usage: traces/reference/record-training.sh FOLDER [PYTHON]   FOLDER gets 06_training/<tag>.json.gz and .txt
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?usage: record-training.sh FOLDER [PYTHON]}
python=${2:-python}
size="--layers 4 --batch 16 --warmup"

# The flags are words of these lists, to be split.
# shellcheck disable=SC2086
while read -r flags; do
  "$python" -m torch.distributed.run --nproc-per-node 2 06_training.py $size $flags --out "$folder" </dev/null
done <<'RUNS'
--parallel ddp
--parallel ddp --bucket-mb 10000
--parallel ddp --slow 1
--parallel fsdp
RUNS

gpu=0
# shellcheck disable=SC2086
while read -r flags; do
  CUDA_VISIBLE_DEVICES=$gpu "$python" 06_training.py $size $flags --out "$folder" </dev/null &
  first=${first:-$!}
  if [ $gpu = 1 ]; then
    wait "$first"
    wait $!
    unset first
  fi
  gpu=$((1 - gpu))
done <<'RUNS'

--for-loop
--fused
--checkpoint
--loader --workers 0
--active 1 --profile-memory
--compile
RUNS
wait ${first:+"$first"}
gzip -9 -n -f "$folder"/06_training/*.json
