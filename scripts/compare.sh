#!/bin/sh
# Prints a table of sizes and of two benchmarks, beside those of the commit that this one left from: scripts/compare.sh [BRANCH], main by default.
# The benchmarks need no database. They take turns, and the table has their medians.
set -eu
cd "$(dirname "$0")/.."
base=$(git merge-base HEAD "${1:-main}")
dir=$(mktemp -d)
trap 'git worktree remove --force "$dir/base"; rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
git worktree add -q --detach "$dir/base" "$base"
export GOTOOLCHAIN=auto

measure() { # TREE SIDE: lines of "name, tab, side, tab, value"
	(
		cd "$1"
		go test -c -o "$dir/$2.test" .
		go build -C examples -trimpath -o "$dir/$2.first" ./first
		go build -C cmd/onceq -trimpath -o "$dir/$2.onceq" .
		printf 'lines of go.sum\t%s\t%s\n' "$2" "$(wc -l <go.sum)"
		printf 'bytes of examples/first\t%s\t%s\n' "$2" "$(wc -c <"$dir/$2.first")"
		printf 'bytes of cmd/onceq\t%s\t%s\n' "$2" "$(wc -c <"$dir/$2.onceq")"
	)
}
run() {
	"$dir/$1.test" -test.run '^$' -test.bench '^(BenchmarkEnqueueMany|BenchmarkDispatch)$' -test.benchtime 300x | awk -v side="$1" '
		/^Benchmark/ {
			sub(/^Benchmark/, "", $1); sub(/-[0-9]+$/, "", $1)
			for (i = 2; i < NF; i++) {
				if ($(i + 1) == "ns/job") print $1 ", ns a job\t" side "\t" $i
				if ($(i + 1) == "allocs/op") print $1 ", allocations a job\t" side "\t" $i / 1000
			}
		}'
}
{
	measure "$dir/base" before
	measure . after
	for _ in 1 2 3 4 5; do run before; run after; done
} >"$dir/figures"

echo "| | $(git rev-parse --short "$base") | $(git rev-parse --short HEAD) | |"
echo "|---|---:|---:|---:|"
sort -t "$(printf '\t')" -k1,1 -k2,2r -k3,3n "$dir/figures" | awk -F '\t' '
	{ n[$1, $2]++; value[$1, $2, n[$1, $2]] = $3; if (!seen[$1]++) names[++count] = $1 }
	function median(name, side) { return value[name, side, int((n[name, side] + 1) / 2)] }
	END {
		for (i = 1; i <= count; i++) {
			b = median(names[i], "before"); a = median(names[i], "after")
			printf "| %s | %s | %s | %+.1f%% |\n", names[i], b, a, b ? 100 * (a - b) / b : 0
		}
	}'
