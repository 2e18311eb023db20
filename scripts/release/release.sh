#!/bin/sh
# Makes a release in a folder, and pushes nothing: a clone with the commits and tags, binaries of the command, their checksums, SBOMs and licences.
#
#	VERSION=0.1.0 scripts/release/release.sh [FOLDER]
#
# FOLDER is dist by default, and must not exist. PLATFORMS are the binaries to be made; TOOLS='' leaves SBOMs and apidiff out.
# What is committed is released. At the commit of a release that is tagged already, such as in CI, it checks the tags instead of making them.
set -eu
cd "$(dirname "$0")/../.."
say() { echo "release: $*" >&2; }
fail() { say "$*"; exit 1; }

echo "${VERSION:-}" | grep -Eq '^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.]+)?$' || fail "VERSION=$VERSION is no version, such as 0.1.0"
version=v$VERSION
out=${1:-dist}
platforms=${PLATFORMS-linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64 windows/arm64}
tools=${TOOLS-cyclonedx apidiff}
cyclonedx=github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0
apidiff=golang.org/x/exp/cmd/apidiff@v0.0.0-20261113113407-e3970619a1a4

# Modules in the order of their dependencies. lab and onceqweb/browsertest have no versions: nobody imports them.
ours=github.com/onceq/onceq
modules='onceqcron onceqotel queuetest/container onceqweb cmd/onceq examples'

[ -z "$(git status --porcelain)" ] || fail "commit first: what is not committed is not released"
mkdir "$out" || fail "remove $out first"
out=$(cd "$out" && pwd)
repo=$out/repository
git clone -q --no-local . "$repo"
cd "$repo"

# Go fetches our modules from the clone, by their tags, as others will from GitHub, and all else from the machine's own cache. A cache of
# its own keeps versions that nobody has published out of that one.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
cat >"$work/gitconfig" <<CONFIG
[user]
	name = $(git -C "$OLDPWD" log -1 --format=%cn)
	email = $(git -C "$OLDPWD" log -1 --format=%ce)
[include]
	path = ${HOME:-/}/.gitconfig
[url "file://$repo"]
	insteadOf = https://$ours
CONFIG
GOPROXY="file://$(go env GOMODCACHE)/cache/download,$(go env GOPROXY)"
export GOPROXY GIT_CONFIG_GLOBAL="$work/gitconfig" GOPRIVATE="$ours" GOMODCACHE="$work/modules" GOPATH="$work/gopath" GOBIN='' \
	GOFLAGS='-modcacherw -trimpath' GOWORK=off GOTOOLCHAIN=auto CGO_ENABLED=0
commit() { git commit -q "$@"; }

last=$(git tag --list 'v*' --sort=-v:refname | grep -vx "$version" | head -1)
if git rev-parse -q --verify "refs/tags/$version" >/dev/null; then
	say "$version is tagged: checking the tags"
	for module in $modules; do
		[ "$(git rev-parse "$module/$version:$module")" = "$(git rev-parse "HEAD:$module")" ] || fail "$module is not what its tag $module/$version has"
		! grep -q '^replace' "$module/go.mod" || fail "$module/go.mod replaces modules"
	done
	[ "$(git rev-parse "$version:go.mod")" = "$(git rev-parse HEAD:go.mod)" ] || fail "go.mod is not what the tag $version has"
else
	if ! grep -q "^## $VERSION" CHANGELOG.md; then
		sed -i.old "s/^## Unreleased\$/## Unreleased\n\n## $VERSION - $(date -u +%F)/" CHANGELOG.md && rm CHANGELOG.md.old
		commit -am "Release $VERSION"
	fi
	go mod tidy -diff || fail "run go mod tidy"
	git tag "$version"
	# One commit for all other modules. A module's checksum says nothing of the commit, so that this one may change until the end.
	commit --allow-empty -m "Modules of $VERSION, which require each other by version"
	for module in $modules; do
		say "$module $version"
		(
			cd "$module"
			edits=$(awk -v ours="$ours" -v v="$version" '
				$1 == "replace" && index($2, ours) == 1 { print "-dropreplace=" $2 }
				$1 != "module" && $1 != "replace" && index($1, ours) == 1 { print "-require=" $1 "@" v }' go.mod)
			# shellcheck disable=SC2086 # a list of words
			go mod edit $edits
			go mod tidy
		)
		commit -a --amend --no-edit --allow-empty
		git tag "$module/$version"
	done
	for module in $modules; do git tag -f "$module/$version" >/dev/null; done
fi

# The section of the changelog, which is what a release's page says.
awk -v v="$VERSION" '/^## / { in_it = $2 == v; next } in_it' CHANGELOG.md | sed -e '/./,$!d' >"$out/NOTES.md"
lines=$(grep -c . "$out/NOTES.md" || true)
[ "$lines" -gt 0 ] || fail "CHANGELOG.md says nothing about $VERSION"
[ "$lines" -le 60 ] || say "warning: CHANGELOG.md has $lines lines about $VERSION; some forty are read"

# What a user gets with each module, tests included, and its licences.
spdx() {
	text=$(tr -s '[:space:]' ' ' <"$1")
	case $text in
	*'Apache License'*) echo Apache-2.0 ;;
	*'Mozilla Public License'*) echo MPL-2.0 ;;
	*'Permission is hereby granted, free of charge'*) echo MIT ;;
	*'Permission to use, copy, modify, and'*distribute*) echo ISC ;;
	*'Redistribution and use in source and binary forms'*'endorse or promote'*) echo BSD-3-Clause ;;
	*'Redistribution and use in source and binary forms'*) echo BSD-2-Clause ;;
	*) echo unknown ;;
	esac
}
tab=$(printf '\t')
say "licences"
for module in . $modules; do
	for os in linux darwin windows; do
		(cd "$module" && GOOS=$os go list -deps -test -f "{{with .Module}}{{.Path}}$tab{{.Version}}$tab{{.Dir}}{{end}}" ./...)
	done
done | grep . | grep -v "^$ours" | sort -u >"$work/deps"
for os in linux darwin windows; do
	(cd cmd/onceq && GOOS=$os go list -deps -f "{{with .Module}}{{.Path}}{{end}}" .)
done | grep . | sort -u >"$work/shipped"
{ echo "onceq"; echo; cat LICENSE; } >"$out/LICENSES.txt"
echo "module${tab}version${tab}licence${tab}in the command" >"$out/licences.tsv"
while IFS=$tab read -r path v dir; do
	file=$(find "$dir" -maxdepth 1 -type f \( -iname 'licen[cs]e*' -o -iname 'copying*' \) | sort | head -1)
	licence=unknown
	[ -z "$file" ] || licence=$(spdx "$file")
	shipped=no
	if grep -qx "$path" "$work/shipped"; then
		shipped=yes
		{ echo; echo "----"; echo "$path $v"; echo; cat "$file"; } >>"$out/LICENSES.txt"
	fi
	echo "$path$tab$v$tab$licence$tab$shipped" >>"$out/licences.tsv"
	[ "$licence" != unknown ] || fail "the licence of $path $v is unknown: $file"
done <"$work/deps"
{ echo; echo "----"; echo "Go $(go env GOVERSION)"; echo; cat "$(go env GOROOT)/LICENSE"; } >>"$out/LICENSES.txt"

# The API beside that of the last release.
case $tools in
*apidiff*)
	if [ -z "$last" ]; then
		echo "There is no earlier release." >"$out/API.txt"
	else
		say "the API beside $last"
		GOBIN=$work go install "$apidiff"
		git worktree add -q --detach "$work/last" "$last"
		for module in . onceqcron onceqotel onceqweb queuetest/container; do
			[ -f "$work/last/$module/go.mod" ] || continue
			path=$ours${module#.}
			[ "$module" = . ] || path=$ours/$module
			(cd "$work/last/$module" && "$work/apidiff" -m -w "$work/before" "$path")
			(cd "$module" && "$work/apidiff" -m -w "$work/after" "$path")
			echo "== $path"
			"$work/apidiff" -m "$work/before" "$work/after"
		done >"$out/API.txt"
		git worktree remove --force "$work/last"
		if grep -q '^Incompatible changes' "$out/API.txt"; then
			case $VERSION in
			*.0 | *.0-*) say "warning: the API has incompatible changes: API.txt" ;;
			*) cat "$out/API.txt" >&2; fail "a patch release has no incompatible changes" ;;
			esac
		fi
	fi
	cat "$out/API.txt" >&2 ;;
esac

# The binaries, made as "go install …@version" makes them. binaries/ is what the Dockerfile reads.
case $tools in *cyclonedx*) GOBIN=$work go install "$cyclonedx" ;; esac
mkdir "$out/binaries"
for platform in $platforms; do
	os=${platform%/*} arch=${platform#*/}
	say "the command for $platform"
	(cd "$work" && GOOS=$os GOARCH=$arch go install -ldflags='-s -w' "$ours/cmd/onceq@$version")
	dir=$out/binaries/${os}_$arch
	mkdir "$dir"
	find "$work/gopath/bin" -type f -name 'onceq*' -exec mv {} "$dir" \;
	go version -m "$dir"/onceq* | grep -q "mod$tab$ours/cmd/onceq$tab$version" || fail "the command for $platform does not know that it is $version"
	cp LICENSE "$out/LICENSES.txt" "$dir"
	name=onceq_${VERSION}_${os}_$arch
	# The same commit makes the same archive: names sorted, times and owners fixed. (GNU tar.)
	tar -c --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -C "$dir" . | gzip -9n >"$out/$name.tar.gz"
	case $tools in *cyclonedx*) "$work/cyclonedx-gomod" bin -json -output "$out/$name.cdx.json" "$(find "$dir" -name 'onceq*')" 2>/dev/null ;; esac
done
(cd "$out" && find . -maxdepth 1 -type f ! -name SHA256SUMS | sed 's|^\./||' | sort | xargs sha256sum >SHA256SUMS)

say "made $(grep -c . "$out/SHA256SUMS") files in $out. Nothing is pushed. To push it:"
echo "git -C $repo push --atomic $(git -C "$OLDPWD" remote get-url origin 2>/dev/null || echo "https://$ours") $version^{commit}:refs/heads/main $version$(for m in $modules; do printf ' %s' "$m/$version"; done)"
