#!/usr/bin/env bash
# Compares the public API of the root package with the committed listing, public-api.txt.
#
#     bash testing/public_api.sh            # what differs; exit status 1 if anything does
#     bash testing/public_api.sh --bless    # takes the API as it is for the listing
#
# Needs cargo-public-api and a nightly toolchain, whose rustdoc writes what it reads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
listing=public-api.txt

found=$(mktemp)
trap 'rm -f "$found"' EXIT
# without blanket and automatic implementations, which follow from the rest
cargo +nightly public-api -p powerinfer -sss >"$found"

if [ "${1:-}" = "--bless" ]; then
    cp "$found" "$listing"
fi
diff -u "$listing" "$found" || {
    echo "error: the public API is not what $listing says; if it is meant to be: $0 --bless" >&2
    exit 1
}
# types of the crates below stay behind the names under which they are re-exported
foreign=$(grep -nE '(candle_core|candle_nn|tokenizers|minijinja|axum|tokio)::' "$listing" || true)
[ -z "$foreign" ] || { echo "error: foreign types in the public API: $foreign" >&2; exit 1; }
echo "the public API is what $listing says: $(wc -l <"$listing") items"
