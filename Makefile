# Cistern. `make demo` shows the main job on a recorded run; `make test` runs the tests. Both install what is missing
# (as root on Debian) or name the package. Go, a C compiler, Node with npm, make and git are enough.

SHELL := /bin/sh
GO ?= go
TRACE ?= recording/testdata/gpt2_varlen.pickle.gz
CAPACITY ?= 20.2GiB

.PHONY: help demo test test-go test-python test-web slow recordings build library plain audit adapters prebuilt wheel release command install install-command web bench soak fuzz race race-rest cross lint model docs engines kubernetes slurm gpu-bundle gpu-test gpu-bench clean tools fidelity ranks
.DEFAULT_GOAL := help

help:
	@echo 'make demo        replay a recorded run (TRACE=file, CAPACITY=size), write bin/demo.html'
	@echo 'make test        the tests; CISTERN_TRACES=folder adds those over recorded traces in it,'
	@echo '                 CISTERN_TORCH=$$(scripts/torch.sh) those of the PyTorch adapter (downloads 530 MB once)'
	@echo 'make slow        tests that take long or measure time, one by one: browser, valgrind, AddressSanitizer, every error at every driver call'
	@echo 'make recordings  the tests over recorded traces alone; they are in CISTERN_TRACES'
	@echo 'make build       bin/cistern with its HTML report, lib/*.so, and dist/*.whl where there is hatchling'
	@echo 'make wheel       dist/*.whl with an adapter for each release of PyTorch (downloads 6 GB once)'
	@echo 'make release     dist/: wheels, commands, C library, checksums, for x86-64 and aarch64 (downloads 9 GB once)'
	@echo 'make adapters    the adapter for each release of PyTorch, and its tests on each'
	@echo 'make fidelity    the cases of lab/torch under real PyTorch without a GPU (FIDELITY=versions; downloads 540 MB once for each)'
	@echo 'make ranks       jobs of three ranks under torchrun of PyTorch 2.11, one of which fails, and what cistern fleet says of them'
	@echo 'make engines     what DuckDB, Spark, Dask and Ray answer over datasets of recordings (downloads 440 MB once)'
	@echo 'make kubernetes  deploy/kubernetes against the types of the API'
	@echo 'make slurm       deploy/slurm on two nodes of Slurm on this machine (as root)'
	@echo 'make install     the C library, its header, files for pkg-config and CMake under PREFIX (/usr/local), below DESTDIR'
	@echo 'make install-command  bin/cistern and its man pages, at the same places'
	@echo 'make race        the tests of packages with concurrency under the race detector'
	@echo 'make race-rest   those of all others, and random tests of the engine for RACETIME (1m) each'
	@echo 'make fuzz        every fuzz target, FUZZTIME each (10s), and HOSTILE changed recordings (300) through each command'
	@echo 'make soak        random tests for SOAKTIME (15m), twice, streams and pools by the million, hostile hosts for HOSTSTIME (1h), HOSTILESOAK changed recordings (100000) through each command, every fuzz target for ten minutes'
	@echo 'make bench       the benchmarks of every package'
	@echo 'make cross       bin/cross: the command for Linux, macOS and Windows'
	@echo 'make model       the protocol between C and Go, every interleaving of two threads (also part of make test)'
	@echo 'make lint        formatting, vet, static analysis, the import rules'
	@echo 'make docs        bin/site: the documents as a site; mkdocs is installed into bin/mkdocs'
	@echo 'make gpu-bundle  gpu-bundle/: what a GPU machine without Go needs; its run.sh says how to use it'
	@echo 'make gpu-test    the bundle, and its tests on the GPU of this machine'
	@echo 'make gpu-bench   the bundle, and its measurements on the GPU of this machine'
	@echo 'make clean       removes what was built'

tools:
	@scripts/need.sh go cc

# The HTML report: bundled from report/web into report/dist, from where the Go package report embeds it.

WEB := report/web/node_modules/.installed
PAGE := report/dist/page.js

$(WEB): report/web/package.json
	@scripts/need.sh node npm
	cd report/web && npm install --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $@

$(PAGE): $(WEB) report/web/build.mjs $(shell find report/web/src -type f)
	cd report/web && npm run --silent build
	@touch $@

web: $(PAGE)

# Go's own cache knows what has changed, so these ask it every time.

build: command library plain audit
	@scripts/need.sh --try hatchling
	@scripts/wheel.sh --try

COMMAND ?= bin/cistern
command: tools $(PAGE)
	$(GO) build -trimpath $(GOBUILDFLAGS) -o $(COMMAND) ./cmd/cistern

wheel: command library plain audit prebuilt
	@scripts/need.sh hatchling
	@scripts/wheel.sh

# What a release has, in dist/; scripts/release.py says what. RELEASEFLAGS='--quick' leaves out the adapters.
RELEASEFLAGS ?=
release: $(PAGE)
	@scripts/need.sh go cc c++ python3 dpkg-deb aarch64-linux-gnu-g++
	scripts/release.py $(RELEASEFLAGS)

# The C library: the version script hides all but cistern_*; -s and -w leave out what only debuggers of Go read. Stacks do not
# shrink, so that signal handlers of the program keep the room that they were given (cmd/libcistern/ready.c).
LIBRARY ?= lib/libcistern.so
LIB = $(patsubst %/,%,$(dir $(LIBRARY)))
GOBUILDFLAGS ?=
LIBRARYLDFLAGS ?= -s -w
# What linked programs look for: another number when docs/c-api.md says so. A hard link, as some archives leave out symbolic ones.
SONAME := libcistern.so.1
library: tools
	@mkdir -p $(LIB)
	CGO_ENABLED=1 $(GO) build -trimpath -buildmode=c-shared $(GOBUILDFLAGS) -o $(LIBRARY) -ldflags "$(LIBRARYLDFLAGS) \
	  -X=runtime.godebugDefault=gcshrinkstackoff=1,asyncpreemptoff=1 -extldflags \
	  '-s -Wl,-soname,$(SONAME) -Wl,--version-script=$(CURDIR)/cmd/libcistern/libcistern.map'" ./cmd/libcistern
	@rm -f $(LIBRARY:.so=.h)
	@ln -f $(LIBRARY) $(LIB)/$(SONAME)

# What PyTorch's plain pluggable allocator loads, for where there is no compiler.
CXX ?= c++
# Links C++; a release links with an older C library than the compiler's, and names the C++ library by its file.
LINK ?= $(CXX)
plain:
	@scripts/need.sh c++
	@mkdir -p $(LIB)
	$(CXX) -std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Icmd/libcistern -c -o $(LIB)/plain.o python/cistern/adapter/plain.cpp
	$(LINK) -shared -s -o $(LIB)/libcistern_plain.so $(LIB)/plain.o $(LINKLIBS) -ldl -lpthread
	@rm $(LIB)/plain.o

# What the wheel carries for each release of PyTorch in python/cistern/adapter/versions; and the adapter's tests on each.
prebuilt:
	@scripts/need.sh python3 c++
	scripts/adapters.py

adapters: library
	@scripts/need.sh python3 c++
	scripts/adapters.py --test

# The cases of lab/torch under releases of PyTorch, over stand-ins for NVIDIA's libraries. How programs are started, which takes long,
# is tried with the first release alone: no code of Cistern's for it differs by release.
FIDELITY ?= 2.11.0 $(lastword $(shell cat python/cistern/adapter/versions))

fidelity: library command plain
	@scripts/need.sh python3 c++
	scripts/adapters.py $(FIDELITY)
	@set -e; skip=; for v in $(FIDELITY); do \
	  OUT=bin/fidelity python3 lab/torch/fidelity.py --standin $$v --name $$v --jobs 2 --budget 900 $$skip; skip='--skip programs'; done

# Ranks under real torchrun, over the same stand-ins. The seed chooses the ranks that fail.
RANKS_SEED ?= 1

ranks: library command
	@scripts/need.sh python3 c++
	scripts/adapters.py 2.11.0
	OUT=bin/ranks python3 lab/torch/ranks.py --standin 2.11.0 --seed $(RANKS_SEED)

# What the dynamic linker loads into programs under cistern trace.
audit: tools
	@mkdir -p $(LIB)
	scripts/audit.sh '$(abspath $(LIB))/libcistern_audit.so'

PREFIX ?= /usr/local
VERSION := $(shell sed -n 's/^const Version = "\(.*\)"/\1/p' version.go)

# The prefix in cistern.pc, from which an archive's differs.
PCPREFIX ?= $(abspath $(PREFIX))
FILL = sed -e 's|@PREFIX@|$(PCPREFIX)|' -e 's|@VERSION@|$(VERSION)|' -e 's|@SONAME@|$(SONAME)|'
INTO := $(DESTDIR)$(PREFIX)

install: library
	install -d $(INTO)/lib/pkgconfig $(INTO)/lib/cmake/cistern $(INTO)/include
	install -m 755 $(LIBRARY) $(INTO)/lib/$(SONAME)
	ln -sf $(SONAME) $(INTO)/lib/libcistern.so
	install -m 644 cmd/libcistern/cistern.h $(INTO)/include/
	$(FILL) cmd/libcistern/install/cistern.pc.in >$(INTO)/lib/pkgconfig/cistern.pc
	$(FILL) cmd/libcistern/install/cistern-config.cmake.in >$(INTO)/lib/cmake/cistern/cistern-config.cmake
	$(FILL) cmd/libcistern/install/cistern-config-version.cmake.in >$(INTO)/lib/cmake/cistern/cistern-config-version.cmake

# The pages are made of the command's own help.
install-command: command
	install -d $(INTO)/bin
	install -m 755 bin/cistern $(INTO)/bin/
	bin/cistern man $(INTO)/share/man

PLATFORMS := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64 windows/arm64

cross: tools $(PAGE)
	@set -e; for p in $(PLATFORMS); do \
	  os=$${p%/*}; arch=$${p#*/}; out=bin/cross/cistern-$$os-$$arch; [ $$os = windows ] && out=$$out.exe; \
	  echo $$out; CGO_ENABLED=0 GOOS=$$os GOARCH=$$arch $(GO) build -trimpath -ldflags '-s -w' -o $$out ./cmd/cistern; \
	done

POLICIES := --policy torch --policy torch:expandable_segments:True --policy cistern

# A recorded training run under three allocators; then the same run on a GPU with little more than it needs.
demo: build
	bin/cistern replay $(POLICIES) --html bin/demo.html $(TRACE)
	@echo
	bin/cistern replay $(POLICIES) --capacity $(CAPACITY) $(TRACE)
	@echo
	@echo "The HTML report of this run: $(CURDIR)/bin/demo.html"

# The packages that `make test` tests.
TESTED ?= ./...
# Tests make much garbage and little that stays: collecting less often takes a third off some. A limit keeps memory in bounds.
QUICKGC := GOGC=400 GOMEMLIMIT=1GiB

# Tests that need Chromium, pkg-config, cmake, groff or valgrind are skipped where those are not here and cannot be
# installed; CISTERN_BROWSER_TEST=1 and CISTERN_TOOLS_TEST=1 forbid that.
test: build
	@scripts/need.sh python3
	@scripts/need.sh --try pkg-config cmake groff
	@scripts/pytools.sh --try
	@$(MAKE) --no-print-directory -j2 test-go test-python test-web

test-go:
	$(QUICKGC) $(GO) test -timeout 30m $(TESTED)
	cd lab && $(QUICKGC) $(GO) test ./...

test-python:
	python3 -m unittest discover -s python -t python

test-web:
	$(if $(wildcard report/web/test/*.test.mjs),cd report/web && npm test --silent)

# One by one, as some measure CPU time or speed.
slow: build
	@scripts/need.sh --try chromium valgrind
	CISTERN_SLOW=1 $(GO) test -count=1 -p 1 -timeout 30m -run '^TestSlow' \
	  $$(grep -rlF --include='*_test.go' --exclude-dir=node_modules 'slow.Only(' . | xargs -n 1 dirname | sort -u)

# Packages with tests over recorded traces.
recordings: tools $(PAGE)
	@[ -n "$$CISTERN_TRACES" ] || { echo 'make recordings: CISTERN_TRACES has to name a folder of recorded traces' >&2; exit 1; }
	$(QUICKGC) $(GO) test -timeout 30m ./analyze ./export ./recording/... ./replay ./report
	$(GO) test -timeout 30m -run '^TestReportRecommendsWhatHolds$$' ./cmd/cistern

lint: tools
	$(GO) test -count=1 ./internal/lint

# What is checked, and in how many states.
model: tools
	$(GO) test -count=1 -v ./internal/magazine/model

# The documents as a site; broken links fail.
docs:
	@scripts/docs.sh

# The programs in examples/fleet, compared with each other and with the command.
engines: command
	@scripts/engines.sh

kubernetes: tools
	cd deploy/kubernetes/check && $(GO) vet ./... && $(GO) test -count=1 ./...

slurm: command library
	@scripts/slurm.sh

# How long random sequences of the engine's are tried under the race detector, and how long new ones by
# `make soak`.
RACETIME ?= 1m
SOAKTIME ?= 15m
# How long all scenarios of hostile hosts take together there.
HOSTSTIME ?= 1h

# Packages whose code or tests share memory between threads.
CONCURRENT := . ./cmd/libcistern ./cuda/... ./internal/audit ./internal/engine/... ./internal/live ./internal/lockrank/... \
  ./internal/magazine ./internal/nopoll ./internal/nvml/... ./internal/share ./internal/stacks ./resource/...
RACE := $(QUICKGC) CISTERN_TRACES= CISTERN_BROWSER_TEST= $(GO) test -race -short -timeout 30m

race: tools
	$(RACE) $(CONCURRENT)

race-rest: tools $(PAGE)
	@set -e; raced=$$($(GO) list $(CONCURRENT)); rest=$$($(GO) list ./... | grep -v /internal/lint | grep -vxF "$$raced"); set -x; $(RACE) $$rest
	CISTERN_SOAK=$(RACETIME) $(RACE) -run 'Random$$' ./internal/engine
	cd lab && $(GO) test -race -short ./...

FUZZTIME ?= 10s

# Inputs for each command that reads recordings, in `make fuzz` and in `make soak`.
HOSTILE ?= 300
HOSTILESOAK ?= 100000

fuzz: tools
	@scripts/hostile.sh $(HOSTILE)
	@scripts/fuzz.sh $(FUZZTIME)

bench: tools
	$(GO) test -run '^$$' -bench . -benchmem ./...

soak: tools $(PAGE) slow
	CISTERN_SEED=new CISTERN_SOAK=$(SOAKTIME) CISTERN_STREAMS=1000000 $(GO) test -count=1 -timeout 3h ./...
	CISTERN_SEED=new CISTERN_SOAK=$(SOAKTIME) $(GO) test -count=1 -race -timeout 3h ./...
	CISTERN_HOSTS=$(HOSTSTIME) $(GO) test -count=1 -timeout 3h -run '^TestHosts$$' ./cmd/libcistern
	@scripts/hostile.sh $(HOSTILESOAK)
	@scripts/fuzz.sh 10m

# Everything a GPU machine without Go needs, Linux only. CISTERN_GPU_SCRIPTS=folder adds the scripts of real workloads,
# CISTERN_PEERS=folder the wheels of other allocators.
CISTERN_GPU_SCRIPTS ?=
CISTERN_PEERS ?=

gpu-bundle: build
	rm -rf gpu-bundle
	mkdir -p gpu-bundle/traces gpu-bundle/bin gpu-bundle/lib gpu-bundle/include
	cp lab/run.sh gpu-bundle/
	cp -r lab/torch gpu-bundle/torch
	cp -r lab/libs gpu-bundle/libs
	cp -r lab/see gpu-bundle/see
	cp -r lab/broker gpu-bundle/broker
	cp -r python/cistern gpu-bundle/cistern
	find gpu-bundle -name __pycache__ -prune -exec rm -rf {} +
	cp lib/*.so gpu-bundle/lib/
	ln gpu-bundle/lib/libcistern.so gpu-bundle/lib/$(SONAME)
	$(if $(wildcard lib/adapters),cp -r lib/adapters gpu-bundle/lib/)
	cp cmd/libcistern/cistern.h gpu-bundle/include/
	cp recording/testdata/*.pickle.gz gpu-bundle/traces/
	$(if $(CISTERN_GPU_SCRIPTS),mkdir gpu-bundle/scripts && cp '$(CISTERN_GPU_SCRIPTS)'/*.py gpu-bundle/scripts/)
	$(if $(CISTERN_PEERS),mkdir gpu-bundle/wheels && cp '$(CISTERN_PEERS)'/*.whl gpu-bundle/wheels/)
	$(GO) build -trimpath -ldflags '-s -w' -o gpu-bundle/bin/ ./cmd/cistern
	cd lab && $(GO) build -trimpath -ldflags '-s -w' -o $(CURDIR)/gpu-bundle/ .
	$(CC) -std=gnu11 -O2 -pthread -Icmd/libcistern lab/native/behaviours.c -o gpu-bundle/behaviours -Lgpu-bundle/lib -lcistern -ldl \
	  -Wl,-rpath,'$$ORIGIN/lib'
	$(CC) -std=gnu11 -O1 -g -pthread -Icmd/libcistern cmd/libcistern/testdata/hosts/*.c -o gpu-bundle/hosts -Lgpu-bundle/lib -lcistern -ldl \
	  -Wl,-rpath,'$$ORIGIN/lib'
	$(CC) -std=gnu11 -O1 -g -shared -fPIC lab/torch/profiler.c -o gpu-bundle/torch/libprofiler.so
	$(CC) -std=gnu11 -O2 -Wall -Wextra -pthread lab/see/churn.c -o gpu-bundle/churn -ldl
	$(CC) -std=gnu11 -O2 -Wall -Wextra lab/native/node.c -o gpu-bundle/node -ldl
	$(CC) -std=gnu11 -O2 -Wall -Wextra -Wno-unused-function -pthread lab/native/pools2.c -o gpu-bundle/pools2 -ldl
	mkdir gpu-bundle/examples
	cp examples/python/*.py gpu-bundle/examples/
	cd examples/go && $(GO) build -trimpath -ldflags '-s -w' -o $(CURDIR)/gpu-bundle/examples/squares .
	$(CC) -std=c99 -O2 -Icmd/libcistern examples/c/memory.c -o gpu-bundle/examples/memory -Lgpu-bundle/lib -lcistern \
	  -Wl,-rpath,'$$ORIGIN/../lib'
	$(CXX) -std=c++17 -O2 -Icmd/libcistern examples/c/containers.cpp -o gpu-bundle/examples/containers -Lgpu-bundle/lib -lcistern \
	  -Wl,-rpath,'$$ORIGIN/../lib'
	$(GO) test -c -trimpath -ldflags '-s -w' -o gpu-bundle/open.test ./cuda/open
	$(GO) test -c -trimpath -ldflags '-s -w' -o gpu-bundle/gpu.test ./internal/gpu
	$(GO) test -c -trimpath -ldflags '-s -w' -o gpu-bundle/resources.test ./resource/open
	$(GO) test -c -trimpath -ldflags '-s -w' -o gpu-bundle/pools.test ./internal/engine
	@du -sh gpu-bundle

gpu-test: gpu-bundle
	gpu-bundle/run.sh test see-driver see-idle see-kill

gpu-bench: gpu-bundle
	gpu-bundle/run.sh bench

clean:
	rm -rf bin lib dist gpu-bundle report/dist/page.js report/dist/page.css report/dist/LICENSES.txt report/web/node_modules
