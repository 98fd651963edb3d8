#!/usr/bin/env bash
# Everything that needs a GPU, in one folder and one run.
#
#   source TOOLCHAIN/env.sh                     # of toolchain.sh, without --slim or with
#   bash testing/cuda/device.sh pack FOLDER     # builds, here: stripped release programs, under 64 MiB
#   bash testing/cuda/device.sh run FOLDER      # on a machine with a GPU; nothing else is needed there
#   bash testing/cuda/device.sh list            # says what would run, and for how long at most
#   bash testing/cuda/device.sh rehearse BENCH  # here, in seconds: the same steps, with the program BENCH on a
#                                               # stand-in, a tiny model, and no checks
#
# `run` takes under six minutes and writes results.json to FOLDER, or to the folder that OUT names. It ends with
# status 3 at once where there is no GPU, with 1 if a check failed or a benchmark gave nothing.
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

pack() {
    local folder=$1 built size
    cd "$(dirname "${BASH_SOURCE[0]}")/../.."
    mkdir -p "$folder"
    folder=$(cd "$folder" && pwd)
    cargo test --release -p powerinfer-ops --features cuda --lib --no-run \
        --message-format=json >"$folder/build.json"
    built=$(grep -o '"executable":"[^"]*"' "$folder/build.json" | tail -1 | cut -d'"' -f4)
    rm "$folder/build.json"
    strip -o "$folder/ops-tests" "$built"
    cargo build --release --features cuda --example bench
    strip -o "$folder/bench" "${CARGO_TARGET_DIR:-target}/release/examples/bench"
    # Each holds candle's kernels as well: compressed they are less than a third.
    gzip -f "$folder/ops-tests" "$folder/bench"
    cp testing/cuda/device.sh "$folder/"
    size=$(du -sb "$folder" | cut -f1)
    echo "$size bytes of $MAX_BYTES in $folder"
    [ "$size" -lt "$MAX_BYTES" ] || { echo "too large to be carried" >&2; exit 1; }
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

run() {
    local out program toolkit device checks sweep benches="" case_line found status=0
    out=$(cd "${OUT:-$1}" && pwd)
    cd "$1"
    for program in *.gz; do
        [ ! -e "$program" ] || { gunzip -f "$program" && chmod +x "${program%.gz}"; }
    done
    for program in ops-tests bench; do
        [ -x "$program" ] || { echo "no $program in $1: \`device.sh pack\` makes it" >&2; exit 2; }
    done
    # The toolkit's libraries, never the stubs that the programs were linked with.
    for toolkit in /usr/local/cuda/lib64 /usr/local/cuda-13*/lib64; do
        [ ! -d "$toolkit" ] || export LD_LIBRARY_PATH="$toolkit${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    done
    if ! device=$(one_test "$CHECK_S" "$DEVICE_TEST" 2>&1); then
        echo "no GPU that these programs can use:" >&2
        grep -m1 'no GPU:' <<<"$device" >&2 || head -5 <<<"$device" >&2
        exit 3
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

case ${1:-} in
    pack) pack "${2:?usage: device.sh pack FOLDER}" ;;
    run) run "${2:?usage: device.sh run FOLDER}" ;;
    list) list ;;
    rehearse) rehearse "${2:?usage: device.sh rehearse BENCH}" ;;
    *) echo "usage: device.sh pack FOLDER | run FOLDER | list | rehearse BENCH" >&2; exit 2 ;;
esac
