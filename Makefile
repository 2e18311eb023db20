# make test needs Go, a C compiler and make; it finds or installs the rest itself.

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOSEC       = github.com/securego/gosec/v2/cmd/gosec@v2.27.1
TIMEOUT     = 45m

# These are modules of their own, which no application gets by importing onceq. lab/ measures and attacks onceq; its
# torture has targets of its own below.
MODULES     = onceqcron onceqotel onceqweb onceqweb/browsertest cmd/onceq examples queuetest/container
LAB         = ./adapter ./bench ./checks ./specs ./tern

# Tests that wait for a lease to run out need no processor, so more tests run at once than there are processors.
PARALLEL    = 6

.PHONY: test tools format imports vet staticcheck gosec lint-modules race modules matrix test-versions test-container pictures page-size demo bench torture torture-ci

# Everything that CI runs, except matrix and torture-ci. The tests of this module wait a lot, so linters run beside them. Other
# tests do not: together they made a busy machine so slow that tests measured the machine.
# Installing comes first, because a package manager serves one caller at a time.
test: format imports tools vet
	@$(MAKE) --no-print-directory -j2 race staticcheck gosec lint-modules
	@$(MAKE) --no-print-directory modules

tools:
	@if [ -z "$$ONCEQ_TEST_IMAGE" ]; then scripts/postgres.sh >/dev/null || exit 1; fi; \
	scripts/pgbouncer.sh >/dev/null && scripts/redis.sh >/dev/null && scripts/node-packages.sh >/dev/null && scripts/chromium.sh >/dev/null

format:
	@echo "== gofmt"
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "to be run through gofmt -w:"; echo "$$unformatted"; exit 1; fi

# An application that imports onceq, or onceqsql, gets pgx and nothing else with it.
imports:
	@echo "== imports of the root package and onceqsql"
	@foreign=$$(go list -f '{{join .Imports "\n"}}' . ./onceqsql | grep -F . | grep -v -E '^github\.com/(jackc/pgx/v5|onceq/onceq)(/|$$)'); \
	if [ -n "$$foreign" ]; then echo "the root package and onceqsql may import the standard library and pgx alone, and not:"; echo "$$foreign"; exit 1; fi
	@modules=$$(grep -c '^	.* v[0-9]' go.mod); \
	if [ "$$modules" -gt 9 ]; then echo "go.mod requires $$modules modules, which an application that imports onceq inherits; at most 9"; exit 1; fi
	@if foreign=$$(grep -E 'testcontainers|jackc/tern' go.mod go.sum); then echo "for the modules queuetest/container and lab, and not for every importer:"; echo "$$foreign"; exit 1; fi
	@lines=$$(wc -l < go.sum); \
	if [ "$$lines" -gt 30 ]; then echo "go.sum has $$lines lines, most of which an application that imports onceq gets; at most 30"; exit 1; fi

vet:
	@echo "== go vet"
	@go vet ./...

staticcheck:
	@echo "== staticcheck"
	@GOTOOLCHAIN=auto go run $(STATICCHECK) ./...

# Without G115: every number that is converted to a narrower type was checked, or counts things that were. Without G404:
# random numbers are jitter, or guard rows against mistakes and not against attackers (docs/SECURITY.md). The excluded
# directories run programs and write files of the developer's own machine, for tests and benchmarks.
gosec:
	@echo "== gosec"
	@GOTOOLCHAIN=auto go run $(GOSEC) -quiet -exclude=G115,G404 -exclude-dir=internal/pgserver -exclude-dir=queuetest -exclude-dir=examples \
		-exclude-dir=lab -exclude-dir=onceqcron -exclude-dir=onceqotel -exclude-dir=onceqweb -exclude-dir=cmd ./...
	@cd onceqcron && GOTOOLCHAIN=auto go run $(GOSEC) -quiet -exclude=G115,G404 ./...
	@cd cmd/onceq && GOTOOLCHAIN=auto go run $(GOSEC) -quiet -exclude=G115,G404 ./...
	@cd onceqweb && GOTOOLCHAIN=auto go run $(GOSEC) -quiet -exclude=G115,G404 -exclude-dir=internal -exclude-dir=browsertest ./...
	@cd onceqotel && GOTOOLCHAIN=auto go run $(GOSEC) -quiet -exclude=G115,G404 -exclude-dir=example ./...

lint-modules:
	@export GOTOOLCHAIN=auto; for module in $(MODULES) lab; do \
		echo "== go vet, staticcheck: $$module" && (cd $$module && go vet ./... && go run $(STATICCHECK) ./...) || exit 1; \
	done

race:
	@echo "== go test -race"
	@scripts/race-ready.sh
	@if [ -z "$$ONCEQ_TEST_IMAGE" ]; then ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; fi; \
	echo "Postgres: $${ONCEQ_TEST_PGBIN:-$$ONCEQ_TEST_IMAGE}"; \
	ONCEQ_TEST_PGBOUNCER=$$(scripts/pgbouncer.sh) || exit 1; export ONCEQ_TEST_PGBOUNCER; \
	go test -race -count=1 -timeout $(TIMEOUT) -parallel $(PARALLEL) ./...

# The same for the modules beside this one. Their dependencies may need a newer Go than onceq does. examples/moving runs
# a Redis, and the Node libraries that an application may move away from; onceqweb/browsertest drives a chromium.
modules:
	@if [ -z "$$ONCEQ_TEST_IMAGE" ]; then ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; fi; \
	ONCEQ_TEST_REDIS=$$(scripts/redis.sh) || exit 1; export ONCEQ_TEST_REDIS; \
	ONCEQ_TEST_NODE=$$(scripts/node-packages.sh) || exit 1; export ONCEQ_TEST_NODE; \
	ONCEQ_TEST_CHROMIUM=$$(scripts/chromium.sh) || exit 1; export ONCEQ_TEST_CHROMIUM; \
	export GOTOOLCHAIN=auto; \
	for module in $(MODULES); do \
		echo "== $$module" && (cd $$module && go test -race -count=1 -timeout $(TIMEOUT) -parallel $(PARALLEL) ./...) || exit 1; \
	done; \
	echo "== lab" && cd lab && { go test -count=1 -timeout $(TIMEOUT) ./model & } && \
	{ go test -race -count=1 -timeout $(TIMEOUT) -parallel $(PARALLEL) $(LAB); tests=$$?; wait $$! && exit $$tests; } # the model is one goroutine

# The suite in every query mode, as a role with only the grants, in an odd schema, and through PgBouncer.
# Some of these modes: make matrix MODES='role pgbouncer'. Check that the tests left out do fail: make matrix MODES=-skipped
matrix:
	@TIMEOUT=$(TIMEOUT) scripts/matrix.sh $(MODES)

# The tests of this module, and of the modules that depend on the server, on each other major version that is supported.
# One of them: make test-versions VERSIONS=18
VERSIONS = 16 17 18
test-versions:
	@for version in $(VERSIONS); do \
		bin=$$(scripts/postgres-version.sh $$version) || exit 1; \
		for module in . onceqcron onceqotel onceqweb cmd/onceq; do \
			echo "== go test $$module, Postgres $$version" && \
			(cd $$module && ONCEQ_TEST_PGBIN="$$bin" GOTOOLCHAIN=auto go test -count=1 -timeout $(TIMEOUT) ./...) || exit 1; \
		done; \
		echo "== go test lab, Postgres $$version" && \
		(cd lab && ONCEQ_TEST_PGBIN="$$bin" GOTOOLCHAIN=auto go test -count=1 -timeout $(TIMEOUT) $(LAB)) || exit 1; \
	done

# The tests on a Postgres in a container.
test-container:
	@scripts/container-test.sh

# The pictures of docs/web.md, taken by the tests in a browser.
pictures:
	@ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; \
	ONCEQ_TEST_CHROMIUM=$$(scripts/chromium.sh) || exit 1; export ONCEQ_TEST_CHROMIUM; \
	dir=$$(mktemp -d) && (cd onceqweb/browsertest && GOTOOLCHAIN=auto go test -count=1 -run EveryPage . -args -pictures "$$dir") && \
	install -m 644 "$$dir/overview.png" "$$dir/effects.png" "$$dir/job-held-dark.png" "$$dir/jobs-phone.png" "$$dir/lanes.png" onceqweb/pictures/; rm -rf "$$dir"

# What each page costs over so many jobs, for docs/web.md. It takes minutes and a kilobyte of memory for each job.
SIZE = 1000000
page-size:
	@ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; \
	ONCEQ_TEST_CHROMIUM=$$(scripts/chromium.sh) || exit 1; export ONCEQ_TEST_CHROMIUM; \
	cd onceqweb/browsertest && GOTOOLCHAIN=auto go test -count=1 -run TestSize -v -timeout 2h . -args -size $(SIZE)

# A web page shows what happens, on the address that it prints. To keep the page open at the end: make demo UI=1
demo:
	@scripts/postgres.sh >/dev/null
	@GOTOOLCHAIN=auto go run -C examples ./demo $(if $(UI),-ui)

# onceq and its peers side by side, on the newest and the oldest supported Postgres, into lab/bench/RESULTS.md.
# A part of it: make bench BENCH='-tests A,C -rounds 5'
bench:
	@cd lab/bench && for version in 18 15; do go run . -pg $$version -o . $(BENCH) || exit 1; done

# Many processes under everything that happens to machines, for some minutes; then the same for River. docs/torture.md says
# what is counted. For hours: make torture TORTURE='-duration 3h -systems onceq'
torture:
	@ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; \
	ONCEQ_TEST_PGBOUNCER=$$(scripts/pgbouncer.sh) || exit 1; export ONCEQ_TEST_PGBOUNCER; \
	cd lab/torture && go run . $(TORTURE)

# A minute of torture, and beside it the tests of the checker, which must find what is broken on purpose.
# The tests of torture wait for faults and leases, so five of them run at once.
torture-ci:
	@ONCEQ_TEST_PGBIN=$$(scripts/postgres.sh) || exit 1; export ONCEQ_TEST_PGBIN; \
	ONCEQ_TEST_PGBOUNCER=$$(scripts/pgbouncer.sh) || exit 1; export ONCEQ_TEST_PGBOUNCER; \
	cd lab/torture && go vet . && { go run . -duration 1m -systems onceq & } && \
	{ go test -count=1 -timeout $(TIMEOUT) -parallel 5 .; tests=$$?; wait $$! && exit $$tests; }
