# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Nothing here needs more than Go, make and, for
# demo, e2e and test, root; vm-test is for Debian, and race and test want gcc.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DELETE_ON_ERROR:
export CGO_ENABLED := 0

VERSION ?= dev
STACK ?= 4
TOOL := go tool -modfile=tools/go.mod
# The lab is a module of its own, so that its dependencies never reach the product.
LAB := go -C lab
VM := $(CURDIR)/bin/lab vm run
CNI_PLUGINS := bridge host-local loopback portmap
SOURCES := go.mod go.sum $(shell find api cmd internal -name '*.go')
LAB_SOURCES := lab/go.mod lab/go.sum $(shell find lab -name '*.go')

.DEFAULT_GOAL := build

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: bin/kg ## build bin/kg

bin/kg: $(SOURCES)
	go build -ldflags '-X main.version=$(VERSION)' -o $@ ./cmd/kg

.PHONY: lab
lab: bin/kg bin/kubelab bin/lab $(CNI_PLUGINS:%=bin/cni/%) ## build what demo and e2e need (the first time some minutes)

# etcd, kube-apiserver and kubectl in one binary. Only its own sources and the
# versions matter: everything else of the lab changes often.
bin/kubelab: lab/go.mod lab/go.sum lab/cmd/kubelab/main.go
	@echo 'building etcd, kube-apiserver and kubectl: the first time 5 to 10 minutes on 2 cores'
	@$(LAB) build -v -o $(CURDIR)/$@ ./cmd/kubelab 2>&1 | awk -v all="$$($(LAB) list -deps ./cmd/kubelab | wc -l)" \
		'/[ :]/ {print; next} ++n % 100 == 0 {printf "  %d packages of at most %d\n", n, all; fflush()}'
	ln -sf kubelab bin/etcd && ln -sf kubelab bin/kube-apiserver && ln -sf kubelab bin/kubectl

bin/lab: $(LAB_SOURCES) $(SOURCES)
	$(LAB) build -o $(CURDIR)/$@ ./cmd/lab

# The plugins are a module of their own again: they want other versions than Kubernetes does.
bin/cni/%: lab/cni/go.mod lab/cni/go.sum
	go -C lab/cni build -o $(CURDIR)/$@ github.com/containernetworking/plugins/plugins/$(if $(filter host-local,$*),ipam,$(if $(filter portmap,$*),meta,main))/$*

.PHONY: demo
demo: lab ## three clouds in one mesh on this machine (root; STACK=4|6|dual, KEEP=1 leaves it running)
	bin/lab demo --stack $(STACK) $(if $(KEEP),--keep)

.PHONY: unit
unit: ## tests of the core, and of the host side in network namespaces (root)
	go vet ./... && go test -count=1 ./...
	$(LAB) vet ./... && $(LAB) test -count=1 . ./cmd/...

.PHONY: prove
prove: ## walk packets through random meshes in all modes: CASES=1000000, SEED=1
	go test -count=1 -timeout 0 -v ./internal/walk -run RandomMeshes -walk.cases $(or $(CASES),100000) -walk.seed $(or $(SEED),1)

.PHONY: bench
bench: ## what planning and comparing cost
	go test -run XXX -bench . -benchmem ./internal/mesh ./internal/host ./internal/walk ./internal/kube

.PHONY: race
race: ## the unit tests of everything concurrent, with the race detector (needs a C compiler)
	CGO_ENABLED=1 go test -race ./internal/agent ./internal/kube ./internal/userwg
	CGO_ENABLED=1 $(LAB) test -race -run Fetch ./vm

.PHONY: lint
lint: ## golangci-lint, formatting, and that what is generated is current
	$(MAKE) -s generate && git diff --exit-code -- api manifests
	$(TOOL) golangci-lint run ./...
	cd lab && go tool -modfile=../tools/go.mod golangci-lint run --config ../.golangci.yml ./...

.PHONY: generate
generate: ## regenerate deepcopy functions and the CRD
	$(TOOL) controller-gen object:headerFile=tools/header.go.txt crd paths=./api/... output:crd:stdout > manifests/crds.yaml

.PHONY: e2e
e2e: lab ## a real API server; the real binaries in the lab: joins, leaves, restarts, bad input (root)
	bin/lab apiserver -- go test -count=1 -run API ./internal/kube
	$(LAB) test -count=1 -timeout 30m ./e2e

# Of Debian's packages, unpacked here.
bin/vm: | bin/lab
	bin/lab vm fetch

# The machine is emulated and needs neither /dev/kvm nor root. Nothing may be skipped in it.
.PHONY: vm-test
vm-test: export CI = true
vm-test: export KILOLAB_BIN = $(CURDIR)/bin
vm-test: lab | bin/vm ## what needs kernel WireGuard and IPIP, in a virtual machine with Debian's kernel
	go test -count=1 -exec '$(VM) --with nft' ./internal/nettest ./internal/userwg ./internal/host
	$(LAB) test -count=1 -exec '$(VM)' .
	$(LAB) test -count=1 -timeout 20m -run KernelLinks ./e2e \
		-exec '$(VM) --cpus 2 --memory 3072 $(addprefix --with $(CURDIR)/,bin/kg bin/etcd bin/kube-apiserver bin/cni manifests)'
	$(LAB) test -count=1 ./vm

.PHONY: test
test: lint unit race vm-test e2e ## all tests

.PHONY: soak
soak: lab ## the e2e tests over and over: COUNT=10
	$(LAB) test -count=$(or $(COUNT),10) -timeout 0 ./e2e

.PHONY: clean
clean: ## remove bin/ and whatever a lab left
	-[ ! -x bin/lab ] || bin/lab down --stale
	rm -rf bin
