#!/usr/bin/env bash
# Records the reference traces of one machine: every rung, one process a run, as a reader would type it.
# Usage: traces/reference/record.sh FOLDER [PYTHON [RUNG]]   RUNG: 04 for one of them; FOLDER gets <script>/<tag>.json.gz and .txt, and
# *.screen.txt with what recompile.py and sweep.py showed
# Without a way to the Hub, set LOCAL_KERNELS (troubleshooting.md).
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?usage: record.sh FOLDER [PYTHON]}
python=${2:-python}
rung=${3:-}
caches=$(mktemp -d)
trap 'rm -rf "$caches"' EXIT

number=0
while read -r script flags; do
  [[ $script == "$rung"* ]] || continue
  echo "== $script $flags"
  export TORCHINDUCTOR_CACHE_DIR=$caches/$((number += 1))  # so that a first call compiles, in every run
  # The flags are words of this list, to be split.
  # shellcheck disable=SC2086
  "$python" "$script" $flags --out "$folder" </dev/null || [ $? = 2 ]  # refused: it needs a GPU
done <<'RUNS'
01_matmul_add.py --size 64
01_matmul_add.py --size 64 --warmup
01_matmul_add.py --size 64 --compile
01_matmul_add.py --size 64 --batch 8 --warmup
01_matmul_add.py --size 64 --warmup --pause 10
01_matmul_add.py --size 64 --wait 0 --schedule-warmup 0
01_matmul_add.py --size 64 --wait 0 --schedule-warmup 0 --active 20
01_matmul_add.py --size 4096
01_matmul_add.py --size 4096 --warmup
01_matmul_add.py --size 4096 --warmup --record-shapes
01_matmul_add.py --size 4096 --wait 0 --schedule-warmup 0 --active 20
01_matmul_add.py --size 4096 --warmup --compile --code
01_matmul_add.py --size 4096 --warmup --compile reduce-overhead
01_matmul_add.py --size 4096 --warmup --compile max-autotune
01_matmul_add.py --size 4096 --warmup --op addmm
02_linear.py
02_linear.py --warmup
02_linear.py --warmup --compile
03_simple_mlp.py
03_simple_mlp.py --warmup
03_simple_mlp.py --warmup --record-shapes
03_simple_mlp.py --warmup --compile --code
03_kernels_mlp.py
03_kernels_mlp.py --warmup
03_kernels_mlp.py --warmup --compile
04_a_naive_attention.py
04_a_naive_attention.py --warmup 0
04_a_naive_attention.py --record-shapes
04_a_naive_attention.py --compile
04_b_inplace_ops_attention.py
04_c_sdpa_attention.py
04_c_sdpa_attention.py --backend math
04_c_sdpa_attention.py --backend efficient
04_c_sdpa_attention.py --backend flash
04_c_sdpa_attention.py --backend flash --record-shapes
04_c_sdpa_attention.py --backend cudnn
04_c_sdpa_attention.py --backend cudnn --record-shapes
04_c_sdpa_attention.py --backend flex
04_d_kernels_attention.py
RUNS
if [ -d "$folder/02_linear" ]; then
  "$python" recompile.py 02_linear.py --strides --compile >"$folder/02_linear/recompile-strides.screen.txt"
fi
if [ -d "$folder/03_simple_mlp" ]; then
  "$python" recompile.py 03_simple_mlp.py --seq 128 256 64 200 --compile >"$folder/03_simple_mlp/recompile-seq.screen.txt"
  "$python" benchmarks/block_sizes.py >"$folder/03_simple_mlp/block-sizes.screen.txt" ||
    rm "$folder/03_simple_mlp/block-sizes.screen.txt"  # it needs a GPU
fi
if [ -d "$folder/03_kernels_mlp" ]; then
  "$python" recompile.py 03_kernels_mlp.py --seq 128 256 64 200 >"$folder/03_kernels_mlp/recompile-seq.screen.txt"
fi
if [ -d "$folder/04_d_kernels_attention" ]; then
  sweep=$folder/sweep-attention
  "$python" sweep.py "04_c_sdpa_attention.py --backend cudnn" "04_c_sdpa_attention.py --backend flash" \
    "04_c_sdpa_attention.py --backend efficient" "04_c_sdpa_attention.py --backend flex" \
    04_b_inplace_ops_attention.py 04_a_naive_attention.py "04_c_sdpa_attention.py --backend math" \
    "04_a_naive_attention.py --compile" --seq 128 512 2048 8192 16384 --out "$sweep" |
    sed -n '/^picture:/d; /not run/p; /^$/,$p' >"$folder/04_a_naive_attention/sweep-seq.screen.txt"
  rm "$sweep"/*/*.txt
  gzip -9 -n -f "$sweep"/*/*.json
fi
gzip -9 -n -f "$folder"/*/*.json
