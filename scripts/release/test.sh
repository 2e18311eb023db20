#!/bin/sh
# A dry run of a release, for this machine's platform alone: it is made in a fresh clone, what it made is there, and its commit passes as tagged.
set -eu
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
fail() { echo "release test: $*" >&2; exit 1; }

git clone -q --no-local . "$dir/clone"
cd "$dir/clone"
PLATFORMS=$(go env GOOS)/$(go env GOARCH)
export PLATFORMS VERSION=0.0.1
scripts/release/release.sh "$dir/out" >/dev/null
[ "$("$dir"/out/binaries/*/onceq --version | grep -c 'v0\.0\.1')" = 1 ] || fail "the command does not say its version"
(cd "$dir/out" && sha256sum --quiet -c SHA256SUMS) || fail "the checksums are wrong"
grep -q "	MIT	yes" "$dir/out/licences.tsv" || fail "no licences"
[ -z "$(git tag)" ] || [ -z "$(git tag --list v0.0.1)" ] || fail "it tagged the tree that it was called in"

# What a tag holds is what a clone of that tag would release, and a change beside it is found.
cd "$dir/out/repository"
git checkout -q cmd/onceq/v0.0.1
TOOLS='' PLATFORMS='' scripts/release/release.sh "$dir/again" >/dev/null || fail "the tagged commit does not pass"
echo "// a change" >>onceqcron/doc.go
git -c user.name=x -c user.email=x@example.com commit -qam change
if TOOLS='' scripts/release/release.sh "$dir/changed" >"$dir/log" 2>&1 || ! grep -q "onceqcron is not what its tag" "$dir/log"; then
	fail "a commit beside its tags passed"
fi
if VERSION=1 scripts/release/release.sh "$dir/bad" 2>/dev/null; then fail "1 is no version"; fi
echo "release test: passed"
