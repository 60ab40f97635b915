#!/bin/sh
# Run one fuzzer from its corpus: run.sh record|jpeg SECONDS. What it finds worth keeping stays in build/fuzz, so that the
# next run goes on from there; a finding is build/fuzz/KIND-crash-*.
set -eu
kind=$1 seconds=$2
cd "$(dirname "$0")/../.."
if command -v clang > /dev/null; then
  mkdir -p "build/fuzz/$kind-found"
  exec "build/fuzz/$kind" -max_total_time="$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=2048 \
    -artifact_prefix="build/fuzz/$kind-" -print_final_stats=1 "build/fuzz/$kind-found" "csrc/fuzz/corpus/$kind"
fi
exec "build/fuzz/$kind" "$seconds" "$(date +%s)" "csrc/fuzz/corpus/$kind"/*
