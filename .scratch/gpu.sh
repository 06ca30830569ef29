set -u
t0=$SECONDS
R=$OUT/rec; mkdir -p $R
say() { echo "== $((SECONDS-t0))s $*"; }
rec() { say "$@"; timeout 100 python3 "$@" --out $R </dev/null > $OUT/last.txt 2>&1 || { echo FAILED; tail -5 $OUT/last.txt; }; head -2 $OUT/last.txt; }
# the newcomer's screen, first
say screen
COLUMNS=80 timeout 100 python3 01_matmul_add.py --size 64 --lanes --out $OUT/tmp > $OUT/screen64.txt 2>&1; cat $OUT/screen64.txt; wc -l $OUT/screen64.txt
rec 03_simple_mlp.py
rec 03_simple_mlp.py --warmup
rec 03_simple_mlp.py --warmup --record-shapes
rec 03_simple_mlp.py --warmup --compile --code
rec 03_simple_mlp.py --warmup --compile --record-shapes
rec 03_kernels_mlp.py
rec 03_kernels_mlp.py --warmup
rec 03_kernels_mlp.py --warmup --record-shapes
rec 03_kernels_mlp.py --warmup --compile
rec 01_matmul_add.py --size 4096 --warmup --compile --code
rec 01_matmul_add.py --size 4096 --warmup --compile reduce-overhead
rec 01_matmul_add.py --size 4096 --warmup --compile max-autotune --code
say block; timeout 120 python3 benchmarks/block_sizes.py > $R/03_simple_mlp/block-sizes.screen.txt 2>$OUT/block.err; cat $R/03_simple_mlp/block-sizes.screen.txt; tail -3 $OUT/block.err
say eager-loading
for mode in LAZY EAGER; do CUDA_MODULE_LOADING=$mode timeout 60 python3 01_matmul_add.py --size 64 --wait 0 --schedule-warmup 0 --out $OUT/$mode --only short >/dev/null 2>&1; COLUMNS=120 python3 -m tracereader $OUT/$mode/01_matmul_add/*.json --only steps,starts --step 0; done
say done
gzip -9 -n -f $R/*/*.json $OUT/*/01_matmul_add/*.json
cd $OUT && tar czf back.tgz rec LAZY EAGER && rm -rf rec LAZY EAGER tmp last.txt
ls -la $OUT
