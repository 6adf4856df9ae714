# Two targets do everything on a fresh Debian machine: `make demo` and `make test`. Bare `make` prints this list.
SHELL := /bin/bash
.DEFAULT_GOAL := help
export PATH := $(PATH):/usr/local/go/bin
# The flags of gotool.BuildFlags: each package is compiled once for all that make runs. -trimpath leaves out the path of the checkout, so the
# build cache serves a clone in another directory, too.
flags := -trimpath -buildvcs=false -gcflags=all=-dwarf=false -tags=grpcnotrace
export GOFLAGS := $(strip $(filter-out $(flags),$(or $(GOFLAGS),$(shell PATH="$(PATH)" go env GOFLAGS 2>/dev/null))) $(flags))
# Targets of one run share a machine, and test names them in order.
.NOTPARALLEL:

# Not go run: it does not forward signals to the program that it runs.
run = @hack/go.sh && go build -o bin/hack/ ./$(1) && exec bin/hack/$(notdir $(1))

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## the main job on a real one-node cluster with 8 simulated H100s (RECORD=docs/demo writes docs/demo.cast and .svg)
	@hack/demo.sh $(if $(RECORD),-record '$(RECORD)')

.PHONY: demo-shell
demo-shell: ## a shell in which kubectl, kubectl gpu and helm reach the demo's cluster
	@hack/demo.sh shell

.PHONY: demo-ui
demo-ui: ## the web page of the demo's cluster, at an address of this machine
	@hack/demo.sh ui

.PHONY: demo-down
demo-down: ## remove the demo's cluster
	@hack/demo.sh down

# The parts of the two tiers, in this order. .github/workflows/long.yaml has one job for each part of test-long.
test_parts := deps verify programs unit+contract+intruder e2e dropin-end
long_parts := deps lint mutations programs simulation kubelet-model torture-whole torture-mig torture-sharing scale \
	e2e-v1.34.10 e2e-v1.35.4 e2e-v1.36.3

.PHONY: test
test: ## what proves a change: verify, unit and contract tests, all stories once (KUBERNETES=v1.36.3, SHARD=1/3 for one of three machines)
	$(call run,hack/cmd/test) -tier test -rest '$(filter-out $(test_parts),$(long_parts)) (make test-long)' -shard '$(SHARD)' $(test_parts)

.PHONY: test-long
test-long: ## what takes hours: a million simulated steps, torture, a fleet, kubelet's sources, linters, the other Kubernetes versions
	$(call run,hack/cmd/test) -tier test-long -rest '$(filter-out $(long_parts),$(test_parts)) (make test)' $(long_parts)

.PHONY: deps
deps: ## install the Debian packages that building and testing need
	@hack/deps.sh

# A machine without the programs of a cluster takes long to build them, and tests have time limits.
.PHONY: programs
programs:
	@[ "$$(id -u)" -ne 0 ] || { hack/go.sh && go build -o bin/hack/ ./hack/cmd/cluster && exec bin/hack/cluster build $(if $(KUBERNETES),-kubernetes $(KUBERNETES)); }

commit = $(shell git rev-parse --short=12 HEAD 2>/dev/null)$(if $(shell git status --porcelain 2>/dev/null),-dirty)
build = go build -ldflags '-X github.com/tandem-gpu/tandem/internal/version.Commit=$(commit)' -o bin/

.PHONY: build
build: ## all programs, into bin/
	@hack/go.sh
	$(build) ./cmd/... ./cli/kubectl-gpu

.PHONY: kubectl-gpu
kubectl-gpu: ## the kubectl plugin, into bin/
	@hack/go.sh
	$(build) ./cli/kubectl-gpu

.PHONY: unit
unit: ## unit tests with the race detector
	hack/unit.sh

.PHONY: contract
contract: ## agent and controller as programs, with a real API server and a fake kubelet (RUN=regexp, CLUSTERS=2)
	$(call run,hack/cmd/stories) -of ./test/contract -race -timeout 1h $(if $(RUN),-run '$(RUN)') $(if $(CLUSTERS),-clusters $(CLUSTERS))

.PHONY: intruder
intruder: ## attacks on an API server with the chart's roles and policies, and what the product expects of an API server
	hack/unit.sh ./test/intruder ./test/facts

.PHONY: e2e
e2e: ## users' stories, on several real clusters at once (KUBERNETES=v1.36.3, RUN=regexp, CLUSTERS=2, SHARD=1/3)
	$(call run,hack/cmd/stories) $(if $(RUN),-run '$(RUN)') $(if $(CLUSTERS),-clusters $(CLUSTERS)) $(if $(SHARD),-shard $(SHARD))

# These stories run on runc, which most users have.
e2e-v%:
	@CONTAINER_RUNTIME=$${CONTAINER_RUNTIME:-runc} $(MAKE) --no-print-directory e2e KUBERNETES=v$*

# What a run of make torture takes from the command line.
torture_flags = $(if $(OPS),-ops $(OPS)) $(if $(SEED),-seed $(SEED)) $(if $(MIG),-mig) $(if $(SHARING),-sharing) \
	$(if $(KUBERNETES),-kubernetes $(KUBERNETES)) $(if $(BUDGET),-budget $(BUDGET)) $(if $(DIR),-dir $(DIR)) $(if $(RESUME),-resume)

.PHONY: torture
torture: ## random operations and faults on a real cluster (OPS=5000 SEED=7 MIG=1 or SHARING=1 BUDGET=15m KUBERNETES=v1.36.3 RESUME=1)
	$(call run,test/cmd/torture) $(torture_flags)

.PHONY: torture-whole torture-mig torture-sharing
torture-whole torture-mig torture-sharing:
	@$(MAKE) --no-print-directory torture $(kind) BUDGET=$(or $(BUDGET),20m) OPS=$(or $(OPS),5000)
torture-mig: kind = MIG=1
torture-sharing: kind = SHARING=1

.PHONY: torture-selftest
torture-selftest: ## with Tandem mutated, the torture's oracle must find faults
	$(call run,test/cmd/torture) selftest $(torture_flags) $(if $(ONLY),-only $(ONLY))

.PHONY: mutations
mutations: ## mistakes in Tandem, each of which a test must detect (ONLY=name)
	$(call run,test/cmd/mutations) $(if $(ONLY),-only $(ONLY))

.PHONY: torture-down
torture-down: ## remove the cluster that an interrupted torture has left
	$(call run,test/cmd/torture) down $(if $(DIR),-dir $(DIR))

.PHONY: simulation
simulation: ## a million steps of a modelled node and cluster, the same again for the same seed (STEPS=50000 SEED=7 LEAST=10)
	go test -count=1 -timeout 12h -run 'TestSimulation$$' -v ./test/simulation -seed $(or $(SEED),0) \
		$(if $(STEPS),-steps $(STEPS) -least $(or $(LEAST),0),-steps 1000000 -least $(or $(LEAST),1))

# What kubelet-model prints besides its result is of no use where it passes.
.PHONY: kubelet-model
kubelet-model: ## the same random sequences to kubelet's own device manager and the simulation's (VERSIONS=v1.36.3,v1.37.1 SEQUENCES=500 SEED=7)
	@hack/go.sh && set -o pipefail && go test -count=1 -timeout 12h -run 'TestKubelet$$' -v ./test/kubeletmodel \
		-versions $(or $(VERSIONS),all) -sequences $(or $(SEQUENCES),10000) -seed $(or $(SEED),0) | sed -u -E '/^(PASS|ok|=== | *--- PASS)/d'

# Where tests leave their results for dropin-end. In make test they run with all others, so that nothing runs twice.
export DROPIN_RESULTS := $(CURDIR)/bin/dropin

.PHONY: dropin
dropin: dropin-begin ## configurations, labels, published manifests and quota, by NVIDIA's programs and by Tandem (CONFIGURATIONS=60000 SEED=7)
	go test -count=1 -timeout 25m -v ./test/dropin -configurations $(or $(CONFIGURATIONS),5000) -seed $(or $(SEED),0)
	$(call run,hack/cmd/stories) -run '^(TestPublished.*|TestQuota|TestValuesOfNVIDIAsCharts)$$'
	@hack/dropin.sh

.PHONY: dropin-begin dropin-end
dropin-begin:
	@rm -rf bin/dropin

dropin-end:
	@hack/dropin.sh

.PHONY: scale
scale: ## figures of a fleet with simulated nodes, as a table and as JSON (N=1000 nodes, RATE=100 pods a second, CURVES=DIRECTORY for drawings)
	$(call run,test/cmd/scale) $(if $(N),-nodes $(N)) $(if $(RATE),-rate $(RATE)) $(if $(CURVES),-curves $(CURVES))

.PHONY: bench
bench: ## what Prepare, Allocate and start-up cost, against a real API server; AGAINST=BUILD compares two builds
	$(call run,test/cmd/bench) $(if $(AGAINST),-against $(AGAINST))

.PHONY: verify
verify: ## formatting, vet, staticcheck, generated files, tidy modules, chart, rules of the repository, shell scripts, commit subjects
	hack/verify.sh

.PHONY: lint
lint: ## golangci-lint, which takes minutes
	hack/verify.sh linters

.PHONY: update
update: ## rewrite what verify compares: formatting, generated files, modules, golden files
	hack/update.sh

.PHONY: image
image: ## the image as a tarball in bin/image, without Docker (ARCH=arm64 for the other one, ARCH=all for both)
	$(call run,hack/cmd/image) build $(if $(ARCH),-arch $(ARCH))

.PHONY: image-push
image-push: ## build for amd64 and arm64 and push (IMAGE=registry/repository:tag)
	$(call run,hack/cmd/image) push -image "$(IMAGE)"

# What a release takes from the command line.
release_flags = -version "$(VERSION)" $(if $(OUT),-out '$(OUT)') $(if $(REGISTRY),-registry '$(REGISTRY)') \
	$(if $(ANY_TOOLCHAIN),-any-toolchain)

.PHONY: release
release: ## the files of a release of this commit (VERSION=v0.2.0 OUT=dir REGISTRY=registry.example.com/gpu; ANY_TOOLCHAIN=1 to rehearse)
	$(call run,hack/cmd/release) build $(release_flags)

.PHONY: release-check
release-check: ## the same from two checkouts, which must give the same bytes
	$(call run,hack/cmd/release) check $(release_flags)

.PHONY: hardware
hardware: ## tests of this machine's GPUs (RUN=Hardware/Cost; STAND_IN=l4x4 without a GPU; RECORDING=file)
	$(call run,hack/cmd/hardware) run $(if $(RUN),-run '$(RUN)') $(if $(STAND_IN),-stand-in $(STAND_IN)) $(if $(RECORDING),-recording '$(RECORDING)')

.PHONY: hardware-bundle
hardware-bundle: ## the same tests as an archive for a machine with a GPU and without Go
	$(call run,hack/cmd/hardware) bundle

.PHONY: hardware-root
hardware-root: ## a root directory for such a machine, in which they also run in a cluster
	$(call run,hack/cmd/hardware) root

.PHONY: clean
clean: ## remove what was built in the checkout
	rm -rf bin

.PHONY: vulnerabilities
vulnerabilities: ## known vulnerabilities in the dependencies, by govulncheck (needs network)
	go run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./... ./cli/... ./hack/... ./test/...
