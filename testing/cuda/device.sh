#!/usr/bin/env bash
# Everything that needs a GPU, in one folder and one run.
#
#   source TOOLCHAIN/env.sh                     # of toolchain.sh, without --slim or with
#   bash testing/cuda/device.sh pack FOLDER     # builds, here: stripped release programs, under 64 MiB
#   bash testing/cuda/device.sh run FOLDER      # on a machine with a GPU and its driver; nothing else is needed there
#   bash testing/cuda/device.sh list            # says what would run, and for how long at most
#   bash testing/cuda/device.sh rehearse BENCH  # here, in seconds: the same steps, with the program BENCH on a
#                                               # stand-in, a tiny model, and no checks
#
# `run` takes under six minutes and writes results.json to FOLDER, or to the folder that OUT names. It ends with
# status 3 at once where there is no GPU or no driver, with 1 if a check failed or a benchmark gave nothing, and
# with 2 where it was called wrongly or a library is missing.
set -euo pipefail

readonly MAX_BYTES=$((64 * 1024 * 1024))
# One place for all limits, in seconds. No step takes longer, whatever hangs.
readonly CHECK_S=20 PARITY_S=50 SWEEP_S=40 KILL_S=2
readonly DEVICE_TEST=cuda::tests::device_is_there
readonly SWEEP_TEST=cuda::tests::sweep::operators_over_density_shape_and_format
# A model, budgets in hundredths of it, arrangements, and the limit. What is compared is llama.cpp's split by
# layers, the parts that are read for every token on the GPU with all neurons on the CPU, and hot and cold.
readonly SPLITS=everything/exact,layers/dense,layers/exact,dense/exact
readonly BENCHES=(
    "llama-7b 55 $SPLITS 25"
    "opt-30b 55 $SPLITS 50"
    "llama-7b 40 $SPLITS 25"
    "opt-30b 40 $SPLITS 50"
    "llama-7b 70 $SPLITS 25"
    "opt-30b 70 $SPLITS 40"
    "llama-7b 100 cpu/exact,whole/dense,whole/exact 15"
)
# OPT's share of neurons that fire, and of those that make 80 % of it (PowerInfer, "Insights").
# Layers repeat the values of four, or making 60 GB of them would take longer than measuring.
readonly FIRING=(--density 0.03 --hot-share 0.17 --distinct-layers 4)

readonly PROGRAMS=(ops-tests bench)
# Where CUDA's libraries lie that the system does not look for; never the stubs that programs are linked with.
readonly LIBRARY_FOLDERS=(/usr/local/cuda/lib64 /usr/local/cuda-13*/lib64 /usr/local/nvidia/lib64 /usr/lib/wsl/lib)
readonly USAGE="usage: device.sh pack FOLDER | run FOLDER | list | rehearse BENCH"

# Ends with a status and says why.
fail() {
    local status=$1
    shift
    echo "device.sh: $*" >&2
    exit "$status"
}

# Builds both programs, stripped, in the folder.
pack_programs() {
    local built
    cargo test --release -p powerinfer-ops --features cuda --lib --no-run \
        --message-format=json >"$folder/build.json"
    built=$(grep -o '"executable":"[^"]*"' "$folder/build.json" | tail -1 | cut -d'"' -f4)
    rm "$folder/build.json"
    strip -o "$folder/ops-tests" "$built"
    cargo build --release --features cuda --example bench
    strip -o "$folder/bench" "${CARGO_TARGET_DIR:-target}/release/examples/bench"
}

# candle links cuBLAS and cuRAND, of which a driver has neither, and makes a handle of each with every device. Our
# kernels call none of them: where they are missing, these take their place. They make handles, and refuse all
# else, which is why the sweep then has no dense product to compare with.
pack_stand_ins() {
    local library stem symbols
    mkdir "$folder/stand-ins"
    for library in $(needed | grep -E '^lib(cublas|cublasLt|curand|nvrtc)\.so'); do
        stem=${library#lib}
        symbols=$(nm -D --undefined-only "${PROGRAMS[@]/#/$folder/}" |
            sed -n "s/.* U \(${stem%%.*}[A-Za-z0-9_]*\).*/\1/p" | sort -u)
        for symbol in $symbols; do
            case $symbol in
                *Create_v2 | *CreateGenerator) echo "int $symbol(void **handle) { *handle = (void *)1; return 0; }" ;;
                *Destroy* | *SetStream* | *Seed) echo "int $symbol(void) { return 0; }" ;;
                *) echo "int $symbol(void) { return 15; }" ;; # not supported
            esac
        done | cc -shared -fPIC -x c - -Wl,-soname,"$library" -o "$folder/stand-ins/$library"
    done
}

# The libraries that the programs in the folder name.
needed() {
    readelf -d "${PROGRAMS[@]/#/$folder/}" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u
}

pack() {
    local repository nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/}nvcc}
    mkdir -p "$1" 2>/dev/null && [ -w "$1" ] || fail 2 "$1 is no folder that can be written"
    [ "${NVCC_STUB:-0}" != 1 ] || fail 2 "with NVCC_STUB=1 there are no kernels to pack"
    command -v "$nvcc" >/dev/null ||
        fail 2 "there is no CUDA compiler $nvcc: source the env.sh that testing/cuda/toolchain.sh makes"
    folder=$(cd "$1" && pwd)
    repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    cd "$repository"
    pack_programs
    rm -rf "$folder/lib" "$folder/stand-ins"
    mkdir "$folder/lib"
    cp -L "${CUDA_HOME:-/usr/local/cuda}"/lib64/libcudart.so.13 "$folder/lib/" ||
        fail 2 "the programs need libcudart.so.13 of the toolkit that they are linked with"
    pack_stand_ins
    # Both hold candle's kernels: together they are hardly larger than one.
    (cd "$folder" && tar -c "${PROGRAMS[@]}" lib stand-ins | xz -T2 -6 --lzma2=preset=6,dict=128MiB >programs.tar.xz)
    rm -r "${PROGRAMS[@]/#/$folder/}" "$folder/lib" "$folder/stand-ins"
    cp testing/cuda/device.sh "$folder/"
    (cd "$folder" && du -b -- *)
    size=$(du -sb "$folder" | cut -f1)
    echo "$size bytes of $MAX_BYTES in $folder"
    [ "$size" -lt "$MAX_BYTES" ] || fail 1 "too large to be carried"
}

# The most seconds that `run` takes.
total_s() {
    local total=$((CHECK_S + PARITY_S + SWEEP_S)) case_line
    for case_line in "${BENCHES[@]}"; do
        total=$((total + ${case_line##* } + KILL_S))
    done
    echo "$total"
}

list() {
    echo "device: $DEVICE_TEST, at most $CHECK_S s"
    echo "parity: every ignored test of cuda::tests, at most $PARITY_S s together"
    echo "sweep: $SWEEP_TEST, at most $SWEEP_S s"
    printf 'bench: %s s at most\n' "${BENCHES[@]}"
    echo "total: at most $(total_s) s"
}

# Runs a program for some seconds at most.
limited() {
    timeout -k "$KILL_S" "$@"
}

# Runs one of the ignored tests.
one_test() {
    limited "$1" ./ops-tests --ignored --exact "$2" --nocapture --test-threads 1
}

# Lines of JSON as the elements of a list.
joined() {
    grep -E '^\{.*\}$' | paste -sd, - || true
}

# The checks, one process each; prints `"name":true` or `false` for each, in a line.
parity() {
    local names name left end=$((SECONDS + PARITY_S)) line="" passed
    names=$(./ops-tests --ignored --list 2>/dev/null | sed -n 's/: test$//p' | grep '^cuda::tests::' || true)
    for name in $names; do
        [ "$name" != "$DEVICE_TEST" ] && [ "$name" != "$SWEEP_TEST" ] || continue
        left=$((end - SECONDS - KILL_S))
        passed=false
        if [ "$left" -gt 0 ] && one_test "$left" "$name" >check.log 2>&1; then
            passed=true
        else
            { echo "$name failed or found no time:"; tail -20 check.log; } >&2
        fi
        line+="\"${name#cuda::tests::}\":$passed,"
    done
    echo "${line%,}"
}

# One benchmark; prints its result, or null and what went wrong.
benchmark() {
    local model budget arrangements limit json log=bench.log
    read -r model budget arrangements limit <<<"$1"
    json=$(limited "$limit" ./bench --synthetic "${SHAPE:-$model}" "${FIRING[@]}" --dtype f16 --kv-dtype f16 \
        --device "${DEVICE:-cuda}" --budgets "$budget" --arrangements "$arrangements" \
        --seconds $((limit * 3 / 5)) -p 16 -n "${TOKENS:-8}" --repetitions 2 --json 2>"$log") || {
        echo "bench $1: status $?" >&2
        tail -5 "$log" >&2
    }
    json=$(grep -E '^\{' <<<"$json" | head -1 || true)
    echo "{\"case\":\"$model $budget\",\"result\":${json:-null}}"
}

# Unpacks what `pack` made, once.
unpack() {
    if [ -f programs.tar.xz ]; then
        if command -v xz >/dev/null; then
            xz -dc programs.tar.xz
        elif command -v python3 >/dev/null; then
            python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open("programs.tar.xz"), sys.stdout.buffer)'
        else
            fail 2 "programs.tar.xz needs xz or python3 to be unpacked"
        fi | tar -x || fail 2 "programs.tar.xz cannot be unpacked"
        rm programs.tar.xz
    fi
    local program
    for program in "${PROGRAMS[@]}"; do
        [ -x "$program" ] || fail 2 "no $program in $PWD: \`device.sh pack\` makes it"
    done
}

# What the loader does not find.
missing() {
    { ldd "${PROGRAMS[@]/#/./}" 2>&1 || true; } |
        sed -n 's/^[[:space:]]*\(lib[^ ]*\) => not found.*/\1/p; s/.*\(version .* not found\).*/\1/p' | sort -u
}

# Sees to it that all libraries are found, and ends if one is not.
find_libraries() {
    local folder wheels left stand_ins
    for folder in "${LIBRARY_FOLDERS[@]}"; do
        [ ! -d "$folder" ] || LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
    done
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
    if [ -n "$(missing)" ]; then
        # the packages that PyTorch brings
        wheels='import nvidia; print(*(path + "/cu13/lib" for path in nvidia.__path__), sep=":")'
        wheels=$(python3 -c "$wheels" 2>/dev/null || true)
        LD_LIBRARY_PATH+=":$wheels:$PWD/lib"
    fi
    stand_ins=$(missing | grep -E '^lib(cublas|cublasLt|curand|nvrtc)\.' | paste -sd' ' || true)
    if [ -n "$stand_ins" ] && [ -d stand-ins ]; then
        echo "device.sh: no $stand_ins: stand-ins are used, and no dense product is compared with" >&2
        LD_LIBRARY_PATH+=":$PWD/stand-ins"
    fi
    left=$(missing | paste -sd, | sed 's/,/, /g')
    case $left in
        *libcuda.so*) fail 3 "no NVIDIA driver: $left is not found" ;;
        ?*) fail 2 "the programs need $left, not found here nor in LD_LIBRARY_PATH=$LD_LIBRARY_PATH" ;;
    esac
}

run() {
    local out device checks sweep benches="" case_line found status=0
    [ -d "$1" ] || fail 2 "$1 is no folder"
    [ -d "${OUT:-$1}" ] && [ -w "${OUT:-$1}" ] || fail 2 "OUT=${OUT:-$1} is no folder that can be written"
    out=$(cd "${OUT:-$1}" && pwd)
    cd "$1"
    unpack
    find_libraries
    # Every check is a process: kernels are compiled by the first of them alone.
    export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$PWD/kernels}
    if ! device=$(one_test "$CHECK_S" "$DEVICE_TEST" 2>&1); then
        fail 3 "no GPU that these programs can use: $(grep -m1 'no GPU:' <<<"$device" || head -5 <<<"$device")"
    fi
    device=$(joined <<<"$device")
    echo "$device" >&2
    checks=$(parity)
    case "$checks" in "" | *:false*) status=1 ;; esac
    sweep=$(one_test "$SWEEP_S" "$SWEEP_TEST" 2>sweep.log | joined) || status=1
    for case_line in "${BENCHES[@]}"; do
        found=$(benchmark "$case_line")
        case "$found" in *'"result":null'* | *'"error":'*) status=1 ;; esac
        benches+="$found,"
        # what there is so far, whatever happens to the rest
        printf '{"device":%s,"parity":{%s},"sweep":[%s],"bench":[%s]}\n' \
            "${device:-null}" "$checks" "$sweep" "${benches%,}" >"$out/results.json"
    done
    cat "$out/results.json"
    exit "$status"
}

# A folder with BENCH and with tests that only say what is wanted, and `run` on it.
rehearse() {
    local bench
    [ -f "$1" ] && [ -x "$1" ] || fail 2 "$1 is no program"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    bench=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
    ln -s "$bench" "$folder/bench"
    cat >"$folder/ops-tests" <<'STUB'
#!/bin/sh
case "$*" in
    *--list*) printf '%s: test\n' cuda::tests::device_is_there cuda::tests::rehearsed \
        cuda::tests::sweep::operators_over_density_shape_and_format ;;
    *device_is_there*) [ -z "${NO_GPU:-}" ] || { echo "no GPU: rehearsed"; exit 101; }
        echo '{"device":"rehearsal"}' ;;
    *rehearsed*) [ -z "${BROKEN:-}" ] ;;
    *) echo '{"op":"rehearsed"}' ;;
esac
STUB
    chmod +x "$folder/ops-tests"
    export DEVICE=hybrid SHAPE=tiny TOKENS=2
    run "$folder"
}

case "${1:-} $#" in
    "pack 2" | "run 2" | "rehearse 2") "$1" "$2" ;;
    "list 1") list ;;
    *) fail 2 "$USAGE" ;;
esac
