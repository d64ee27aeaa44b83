#!/bin/sh
# onnxruntime-web's WebAssembly from its npm package into a folder, for the console's page /edge: sh wasm.sh FOLDER
# Two files of 14 MB that git ignores. A registry of one's own comes in as NPM_CONFIG_REGISTRY.
set -eu
VERSION=1.30.0
command -v npm >/dev/null || { echo "no npm: the page /edge stays without a runtime (Debian: apt install npm)" >&2; exit 1; }
part="$(mktemp -d)"
trap 'rm -rf "$part"' EXIT
(cd "$part" && npm pack "onnxruntime-web@$VERSION" --silent >/dev/null)
tar -xzf "$part/onnxruntime-web-$VERSION.tgz" -C "$part"
mkdir -p "$1"
cp "$part/package/dist/ort.wasm.bundle.min.mjs" "$part/package/dist/ort-wasm-simd-threaded.wasm" "$1"
