#!/usr/bin/env bash
# Records the reference traces of rung 5, whose runs are others on a GPU than on a laptop.
# Usage: traces/reference/record_llm.sh FOLDER [PYTHON]   FOLDER/05_llm gets <tag>.json.gz and .txt, and what sweep.py showed
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?usage: record_llm.sh FOLDER [PYTHON]}
python=${2:-python}
gpu=$("$python" -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")')

while read -r where script flags; do
  [ "$where" = "$gpu" ] || continue
  echo "== $script $flags"
  # The flags are words of this list, to be split.
  # shellcheck disable=SC2086
  "$python" "$script" $flags --out "$folder" </dev/null
done <<'RUNS'
gpu 05_llm.py --warmup --active 2 --record-shapes
gpu 05_llm.py --warmup --graph
gpu 05_llm.py --warmup --compile
gpu 05_llm.py --warmup --compile reduce-overhead
gpu 05_llm.py --warmup --compile reduce-overhead --attention gqa
gpu 05_llm.py --warmup --compile reduce-overhead --attention gqa --merge
gpu 05_llm.py --warmup --compile reduce-overhead --attention flex
gpu 05_llm.py --warmup --compile max-autotune --attention gqa --tune
gpu 05_llm.py --warmup --compile max-autotune-no-cudagraphs --attention gqa --tune --graph
gpu 05_llm.py --warmup --compile max-autotune-no-cudagraphs --attention gqa --tune --merge --graph
gpu 05_llm.py --warmup --triton overlap --active 2
gpu 05_llm.py --warmup --triton --graph
gpu 05_llm.py --warmup --triton overlap --graph
gpu 05_llm.py --warmup --persistent
gpu 05_llm.py --warmup --persistent inside
gpu 05_llm.py --warmup --batch 32 --active 1
gpu 05_llm.py --warmup --batch 32 --graph
gpu 05_llm.py --warmup --batch 32 --compile reduce-overhead --attention gqa
gpu 05_llm.py --warmup --phase prefill --active 2
gpu 05_llm.py --warmup --phase prefill --cache dynamic --logits last --graph
gpu 05_llm.py --warmup --phase prefill --cache dynamic --logits last --compile
cpu 05_llm.py --warmup --layers 4 --record-shapes
cpu 05_llm.py --warmup --layers 4 --phase prefill
RUNS
gzip -9 -n -f "$folder"/05_llm/*.json

# Of these the pictures and the tables are kept: a trace of each of them would be 200 KB.
if [ "$gpu" = gpu ]; then
  while read -r screen flags; do
    # shellcheck disable=SC2086
    "$python" sweep.py 05_llm.py --warmup --attention gqa --graph $flags --out "$folder/sweep" |
      sed -n '/^picture:/d; /^$/,$p' >"$folder/05_llm/$screen.screen.txt"
  done <<'RUNS'
sweep-batch --batch 1 2 4 8 16 32 64 128 256
sweep-batch-short --batch 1 4 16 64 256 1024 --prompt 16 --cache-len 32
RUNS
  cp "$folder"/sweep/05_llm/*.png "$folder/05_llm"
  rm -r "$folder/sweep"
fi
