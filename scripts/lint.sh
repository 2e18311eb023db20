#!/bin/sh
# vet, staticcheck and gosec over all modules. A go.work in a directory of its own joins the modules, so that each linter reads
# everything once and not once for each module.
#
# gosec is without G115: every number that is converted to a narrower type was checked, or counts things that were. Without G404:
# random numbers are jitter, or guard rows against mistakes and not against attackers (docs/run/security.md). The directories that are left out
# run programs and write files of the developer's own machine, for tests and benchmarks.
set -eu
cd "$(dirname "$0")/.."

staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2
gosec=github.com/securego/gosec/v2/cmd/gosec@v2.27.1
modules='. onceqcron onceqotel onceqweb onceqweb/browsertest cmd/onceq examples queuetest/container lab'

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' INT TERM
export GOTOOLCHAIN=auto
GOBIN=$dir go install "$staticcheck"
GOBIN=$dir go install "$gosec"

export GOWORK="$dir/go.work"
uses= packages=
for module in $modules; do
	uses="$uses $PWD/$module"
	packages="$packages ./$module/..."
done
# shellcheck disable=SC2086
{
	go work init $uses
	go vet $packages
	"$dir/staticcheck" $packages
}
"$dir/gosec" -quiet -exclude=G115,G404 -exclude-dir=internal/pgserver -exclude-dir=internal/listing -exclude-dir=onceqweb/internal -exclude-dir=queuetest -exclude-dir=scripts \
	-exclude-dir=examples -exclude-dir=onceqotel/example -exclude-dir=lab -exclude-dir=onceqweb/browsertest ./...
