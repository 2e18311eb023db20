# make prints what there is. It needs Go and make, and for the race detector of "make check" a C compiler; it finds or installs the rest itself.

TIMEOUT = 45m

# What the tests run. scripts/ finds each of these programs, or installs it.
SERVERS = if [ -z "$$ONCEQ_TEST_IMAGE$$ONCEQ_TEST_DATABASE_URL" ]; then ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; fi; \
	ONCEQ_TEST_PGBOUNCER=$$(scripts/pgbouncer.sh) || exit 1; export ONCEQ_TEST_PGBOUNCER
PROGRAMS = $(SERVERS); ONCEQ_TEST_REDIS=$$(scripts/redis.sh) || exit 1; export ONCEQ_TEST_REDIS; \
	ONCEQ_TEST_NODE=$$(scripts/node-packages.sh) || exit 1; export ONCEQ_TEST_NODE; \
	ONCEQ_TEST_PYTHON=$$(scripts/psycopg2.sh) || exit 1; export ONCEQ_TEST_PYTHON; \
	ONCEQ_TEST_CHROMIUM=$$(scripts/chromium.sh) || exit 1; export ONCEQ_TEST_CHROMIUM
LAB = ./adapter ./bench ./checks ./once ./recovery ./specs ./tern

.PHONY: help test check race modules modules-short lint format imports matrix test-versions test-container pictures page-size house mutate demo bench compare once torture torture-ci vulnerabilities release release-test

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' Makefile

# A web page shows what happens, on the address that it prints. To keep the page open at the end: make demo UI=1
demo: ## see it: workers that are killed and frozen, in a minute; UI=1 leaves the page open
	@scripts/postgres.sh >/dev/null
	@GOTOOLCHAIN=auto go run -C examples ./demo $(if $(UI),-ui)

# The parts of these are in scripts/check/plan.go.
test: ## the tests, in minutes: run it before and after a change
	@$(SERVERS); go run ./scripts/check test

check: ## everything, in an hour: all tests under the race detector, linters, all modules, a browser, torture
	@$(PROGRAMS); scripts/race-ready.sh && go run ./scripts/check check

race: ## a part of check: the tests of this module under the race detector
	@$(SERVERS); scripts/race-ready.sh && go run ./scripts/check race

modules: ## a part of check: the tests of the other modules (installs a redis-server, a chromium and psycopg2, needs npm)
	@$(PROGRAMS); scripts/race-ready.sh && go run ./scripts/check modules

modules-short: ## the short tests of onceqcron, onceqotel, onceqweb and the command
	@$(SERVERS); go run ./scripts/check modules-short

lint: ## a part of check: vet, staticcheck and gosec over all modules
	@go run ./scripts/check lint

# What Go's list of vulnerabilities says of the code that each module calls.
vulnerabilities: ## govulncheck over all modules that users import or run
	@for module in . onceqcron onceqotel onceqweb cmd/onceq queuetest/container; do \
		echo "== govulncheck $$module" && (cd $$module && go run golang.org/x/vuln/cmd/govulncheck@v1.9.0 -test ./...) || exit 1; \
	done

torture-ci: ## a part of check: a minute of torture, and the tests of its checker
	@$(SERVERS); go run ./scripts/check torture-ci

format:
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "to be run through gofmt -w:"; echo "$$unformatted"; exit 1; fi

# An application that imports onceq, or onceqsql, gets pgx and nothing else with it.
imports:
	@foreign=$$(go list -f '{{join .Imports "\n"}}' . ./onceqops ./onceqsql | grep -F . | grep -v -E '^github\.com/(jackc/pgx/v5|onceq/onceq)(/|$$)'); \
	if [ -n "$$foreign" ]; then echo "the root package, onceqops and onceqsql may import the standard library and pgx alone, and not:"; echo "$$foreign"; exit 1; fi
	@modules=$$(grep -c '^	.* v[0-9]' go.mod); \
	if [ "$$modules" -gt 9 ]; then echo "go.mod requires $$modules modules, which an application that imports onceq inherits; at most 9"; exit 1; fi
	@if foreign=$$(grep -E 'testcontainers|jackc/tern' go.mod go.sum); then echo "for the modules queuetest/container and lab, and not for every importer:"; echo "$$foreign"; exit 1; fi
	@lines=$$(wc -l < go.sum); \
	if [ "$$lines" -gt 30 ]; then echo "go.sum has $$lines lines, most of which an application that imports onceq gets; at most 30"; exit 1; fi

# The suite in every query mode, as a role with only the grants, in an odd schema, and through PgBouncer.
# Some of these modes: make matrix MODES='role pgbouncer'. Check that the tests left out do fail: make matrix MODES=-skipped
matrix: ## the tests in every query mode, as a role with only the grants, in an odd schema, on newer tables, through PgBouncer
	@TIMEOUT=$(TIMEOUT) scripts/matrix.sh $(MODES)

# The tests of this module, and of the modules that depend on the server, on each other major version that is supported.
# One of them: make test-versions VERSIONS=18
VERSIONS = 16 17 18
test-versions: ## the tests on PostgreSQL 16, 17 and 18
	@for version in $(VERSIONS); do \
		bin=$$(scripts/postgres-version.sh $$version) || exit 1; \
		for module in . onceqcron onceqotel onceqweb cmd/onceq; do \
			echo "== go test $$module, Postgres $$version" && \
			(cd $$module && ONCEQ_TEST_PGBIN="$$bin" GOTOOLCHAIN=auto go test -count=1 -timeout $(TIMEOUT) ./...) || exit 1; \
		done; \
		echo "== to Postgres $$version by logical replication" && \
		(cd lab && ONCEQ_TEST_PGBIN=$$(../scripts/postgres.sh) ONCEQ_TEST_PGBIN_NEWER="$$bin" GOTOOLCHAIN=auto go test -count=1 -timeout $(TIMEOUT) -run Logical ./recovery) || exit 1; \
		echo "== go test lab, Postgres $$version" && \
		(cd lab && ONCEQ_TEST_PGBIN="$$bin" GOTOOLCHAIN=auto go test -count=1 -timeout $(TIMEOUT) $(LAB)) || exit 1; \
	done

# The tests on a Postgres in a container.
test-container: ## the tests of queuetest/container, on a Postgres in a container
	@scripts/container-test.sh

# The measures of the library's size beside their ceilings, which TestHouse holds. LOWER=1 lowers the ceilings to what is measured.
house: ## how much there is to read, beside its ceilings
	@cd lab/house && GOTOOLCHAIN=auto go run . $(if $(LOWER),-lower)

# A part of them: make mutate ONLY='fence|lane'
mutate: ## breaks the code one line at a time and shows which test fails
	@$(SERVERS); cd lab/mutate && GOTOOLCHAIN=auto go run . -v $(if $(ONLY),-only '$(ONLY)')

# The pictures of docs/run/web.md, taken by the tests in a browser.
pictures: ## the pictures of docs/run/web.md, taken in a browser
	@ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; \
	ONCEQ_TEST_CHROMIUM=$$(scripts/chromium.sh) || exit 1; export ONCEQ_TEST_CHROMIUM; \
	dir=$$(mktemp -d) && (cd onceqweb/browsertest && GOTOOLCHAIN=auto go test -count=1 -run 'EveryPage|Terminal' . -args -pictures "$$dir") && \
	install -m 644 "$$dir/overview.png" "$$dir/effects.png" "$$dir/job-held-dark.png" "$$dir/jobs-phone.png" "$$dir/lanes.png" "$$dir/terminal.png" onceqweb/pictures/; rm -rf "$$dir"

# What each page costs over so many jobs, for docs/run/web.md. It takes minutes and a kilobyte of memory for each job.
SIZE = 1000000
page-size: ## what each page of onceqweb costs over a million jobs
	@ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; \
	ONCEQ_TEST_CHROMIUM=$$(scripts/chromium.sh) || exit 1; export ONCEQ_TEST_CHROMIUM; \
	cd onceqweb/browsertest && GOTOOLCHAIN=auto go test -count=1 -run TestSize -v -timeout 2h . -args -size $(SIZE)

# onceq and its peers side by side, on the newest and the oldest supported Postgres, into lab/bench/RESULTS.md.
# A part of it: make bench BENCH='-tests A,C -rounds 5'
bench: ## onceq and its peers side by side, into lab/bench/RESULTS.md
	@cd lab/bench && for version in 18 15; do go run . -pg $$version -o . $(BENCH) || exit 1; done

compare: ## sizes and two benchmarks beside those of main
	@scripts/compare.sh

# Stories with one question each, into docs/use/once.md. One cell, row or column of its table: make once ONLY='asked-twice/River'
once: ## what becomes of one piece of work when something goes wrong, on onceq and others, into docs/use/once.md
	@ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; \
	cd lab/once && GOTOOLCHAIN=auto go run . -o ../../docs/use/once.md -only '$(ONLY)'

# Many processes under everything that happens to machines, for some minutes; then the same for River. docs/work/torture.md says
# what is counted. For hours: make torture TORTURE='-duration 3h -systems onceq'
torture: ## processes and a server under faults, for minutes or hours; docs/work/torture.md
	@ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; \
	ONCEQ_TEST_PGBOUNCER=$$(scripts/pgbouncer.sh) || exit 1; export ONCEQ_TEST_PGBOUNCER; \
	cd lab/torture && go run . $(TORTURE)

# A release in dist/: the commits and tags in a clone, binaries, checksums, SBOMs, licences. docs/work/contributing.md says what is left to do.
release: ## all of a release but the push, into dist/: make release VERSION=0.1.0
	@VERSION='$(VERSION)' scripts/release/release.sh

release-test: ## a dry run of a release, for this machine's platform
	@scripts/release/test.sh
