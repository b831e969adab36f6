#!/usr/bin/env bash
# Ten minutes on one machine with a GPU, in the root of a checkout: what a card says and this project cannot know without one.
#   bash benchmarks/gpu/session.sh        # PY: a Python with the project and a CUDA JAX; OUT: where the log goes
# Without PY, make installs .venv-cuda: 5.8 GB, some minutes more.
set -u
OUT=${OUT:-$PWD/gpu_out}; PY=${PY:-.venv-cuda/bin/python}
mkdir -p "$OUT"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
say() { echo "=== $1 ($(date +%T))" | tee -a "$OUT/log"; }
log() { tee -a "$OUT/log"; }
launch() { timeout 90 "$PY" -m harness.launch "$@" 2>&1; }
"$PY" -c 'import jax' 2>/dev/null || make cuda-setup

say "1 the machine"
nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total --format=csv | log
"$PY" -c 'import jax; print(jax.__version__, jax.devices())' 2>&1 | log

say "2 the tests of a card"
JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_DEFAULT_MATMUL_PRECISION=highest \
  timeout 240 "$PY" -m pytest -q -m gpu tests/gpu 2>&1 | tail -15 | log

say "3 copies and steps: benchmarks/results/gpu.json"
timeout 240 "$PY" -m benchmarks.gpu 2>&1 | grep -a '^{' | log

say "4 memory of a worker on the host, while it trains"
launch --ps=1 --workers=1 -- "$PY" -m models.mnist.minimal --train_steps=4000 > "$OUT/mnist" & job=$!
sleep 20
ps -eo rss,args --sort=-rss | grep -a '[m]odels.mnist.minimal' | head -3 | log
nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader | log
wait $job; tail -1 "$OUT/mnist" | log

say "5 command buffers: the second figure is without"
for flags in "" "--xla_gpu_enable_command_buffer="; do
  XLA_FLAGS=$flags launch --ps=2 --workers=1 -- "$PY" -m benchmarks.gpu.step --layers=80 | grep -a -o '{"device.*' | log
done

say "6 compiled programs on disk: the second start compiles nothing"
for i in 1 2; do
  began=$(date +%s)
  JAX_COMPILATION_CACHE_DIR=$OUT/cache launch --ps=1 --workers=1 -- "$PY" -m models.mnist.trainer --logdir="$OUT/run$i" --epochs=1 \
    | grep -a Accuracy | log
  echo "$(($(date +%s) - began)) s" | log
done
