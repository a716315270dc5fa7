# braidfs: `make help` lists the targets.
CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
TARGET := $(or $(CARGO_TARGET_DIR),target)
PEERS := pjdfstest fsx postgres rocksdb dbench big
# What mkfs(8), mount(8), umount(8) and fsck(8) look for. The last ones by the type that the kernel shows, at a remount
# and at an unmount.
HELPERS := mkfs.braidfs mount.braidfs umount.braidfs fsck.braidfs \
	mount.fuse.braidfs mount.fuseblk.braidfs umount.fuse.braidfs umount.fuseblk.braidfs
# Built together with the command, what both use is built once, as the command has it.
CONFLICTS_TOOL := $(CARGO) build --release -p braidfs-cli -p braidfs-conflicts && $(TARGET)/release/braidfs-conflicts
CONFLICTS := $(CONFLICTS_TOOL) run
MAN := $(DESTDIR)$(PREFIX)/share/man
# Patterns are the shell's: the pages are there only after the first line of the recipe.
NAMES := braidfs.8 braidfs-*.8 mkfs.braidfs.8 mount.braidfs.8 umount.braidfs.8 fsck.braidfs.8
PAGES := $(addprefix $(MAN)/man8/,$(NAMES))
# Where earlier versions put them.
OLD_PAGES := $(addprefix $(MAN)/man1/,$(NAMES))

.DEFAULT_GOAL := help
.PHONY: help build demo bench test fmt clippy unit heavy crash planted mount mount-ring aging conflicts conflicts-part conflicts-planted conflicts-bless projection ablations ablations-test fill coherence opens resize-kill million xfstests soak fuzz fuzz-coverage layers models deny peers $(PEERS) deps install uninstall clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z$$()A-Z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo "  make NAME           with NAME one of $(PEERS): that program on a mounted braidfs"

build: ## the release binary, target/release/braidfs
	$(CARGO) build --release -p braidfs-cli

demo: deps ## real work on a braidfs beside an ext4, a killed daemon, a table (under 3 minutes)
	@python3 scripts/demo.py

bench: ## library speed beside tmpfs and ext4, device traffic, memory (as root; 2 minutes)
	$(CARGO) run --release -p braidfs-cli -- bench speed
	$(CARGO) test --release -p braidfs --test traffic --test memory -- --ignored --nocapture

aging: deps ## file systems that age: filled to 70 to 95 %, overwritten and churned, beside ext4, XFS, btrfs; JSON=FILE, DOCS=1, AGING="--size 4G" (as root; an hour)
	@command -v mkfs.xfs mkfs.btrfs | grep -q btrfs || scripts/deps.sh xfsprogs btrfs-progs
	$(CARGO) run --release -p braidfs-cli -- bench aging -o $(or $(JSON),$(TARGET)/aging.json) $(if $(DOCS),--docs docs) $(AGING)

test: layers fmt clippy unit heavy planted mount conflicts-part ## everything that must pass before a change goes in (some 20 minutes on two cores, compiling included)

fmt: ## is everything formatted
	$(CARGO) fmt --all --check

clippy: ## lints, warnings are errors
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy -p braidfs-testkit --all-targets --features schedule,planted-bugs -- -D warnings

unit: ## tests of all crates but the heavy ones
	$(CARGO) test --workspace --exclude braidfs-testkit

heavy: ## model, crash and thread tests, optimised
	$(CARGO) test --release -p braidfs-testkit --features schedule

crash: ## every crash workload, for hours; interrupt it, the same command goes on
	$(CARGO) run --profile crash -p braidfs-testkit --features schedule --bin crash -- full

planted: ## do the crash tests see bugs on purpose
	$(CARGO) run --release -p braidfs-testkit --features planted-bugs --bin crash -- planted
	$(CARGO) test --release -p braidfs-testkit --features planted-bugs --test planted --test planted_clock --test planted_resize --test planted_shared --test shared_dir

mount: ## tests on a mounted volume (needs /dev/fuse, else it says so and skips)
	@python3 scripts/test-mount.py

mount-ring: ## the same through io_uring (turns the kernel's switch on for that time; root)
	@python3 scripts/test-mount.py --ring

conflicts: deps ## cache lines that threads share: 19 tests x 2 to 32 workers, JSON=FILE, BLESS=1, DOCS=1 (4 minutes)
	$(CONFLICTS) $(if $(JSON),--json $(JSON)) $(if $(BLESS),--bless) $(if $(DOCS),--docs docs)

conflicts-part: ## the part of it that `make test` runs, 7 tests with 2 and 8 workers
	$(CONFLICTS) --skip --slack 20 --tests DRBL,DWOL,DWSL,MRPL,MRPH,MWCL,MWRM --workers 2,8

conflicts-planted: deps ## does it see ten shared writes on purpose
	$(CARGO) run --release -p braidfs-conflicts --features planted-sharing -- planted

projection: deps ## upper bound of each test's throughput on 1 to 128 cores, JSON=FILE, DOCS=1 (10 minutes; its times want an idle machine)
	$(CONFLICTS_TOOL) time --switches none all --json $(TARGET)/projection-times.json
	$(CARGO) run --release -p braidfs-conflicts --features lock-sections -- project --times $(TARGET)/projection-times.json \
		$(if $(JSON),--json $(JSON)) $(if $(DOCS),--docs docs)

ablations: deps ## what each switch for experiments costs, by transfers and by time, JSON=FILE, DOCS=1 (6 minutes; its times want an idle machine)
	$(CONFLICTS_TOOL) ablations $(if $(JSON),--json $(JSON)) $(if $(DOCS),--docs docs)

ablations-test: ## the engine's unit tests and those of several threads with each switch for experiments (5 minutes with compiling)
	@for s in gate slots cells arcs all; do echo "== BRAIDFS_ABLATION=$$s"; export BRAIDFS_ABLATION=$$s; \
		$(CARGO) test --release -p braidfs --lib && \
		$(CARGO) test --release -p braidfs-testkit --features schedule --test threads || exit 1; done

conflicts-bless: ## new baseline, tables and pictures of the conflict checker, the projection and the ablations (20 minutes)
	$(MAKE) --no-print-directory conflicts BLESS=1 DOCS=1
	$(MAKE) --no-print-directory projection DOCS=1
	$(MAKE) --no-print-directory ablations DOCS=1

fill: ## rounds of filling and removing, 64 MiB to 4 GiB: is there what df offers (as root; 20 minutes)
	@python3 scripts/fill-rounds.py

coherence: ## on a mounted volume: every way of writing against every way of reading, COHERENCE_SECONDS each (default 2)
	@COHERENCE_SECONDS=$(or $(COHERENCE_SECONDS),2) python3 scripts/test-mount.py no_reader_sees direct_writes what_was_held

opens: ## on a mounted volume: a million random creates, opens, unlinks, reads, closes; ENOSPC with 100,000 known files
	@OPENS_STEPS=$(or $(OPENS_STEPS),330000) OPENS_FILES=$(or $(OPENS_FILES),100000) python3 scripts/test-mount.py random_opens what_was_accepted

resize-kill: ## kill -9 at random moments while volumes become larger, ROUNDS (default 200; 5 minutes)
	@python3 scripts/resizing.py $(or $(ROUNDS),200)

soak: ## random load with kill -9 and remount every few seconds (SOAK_SECONDS, default 60)
	@python3 scripts/soak.py

million: ## a million files in one directory: does a file cost more then? library, mount, ext4 (5 minutes)
	$(CARGO) test --release -p braidfs --test million -- --ignored --nocapture
	@python3 scripts/million.py

fuzz: ## all fuzz targets with the built-in mutator, FUZZ_SECONDS each (default 60)
	$(CARGO) run --profile fuzz -p braidfs-fuzz --bin braidfs-fuzz -- --seconds $(or $(FUZZ_SECONDS),60)

fuzz-coverage: ## the same under libFuzzer, which looks for new code (cargo install cargo-fuzz)
	@scripts/fuzz-coverage.sh

models: ## locks, look-ups and opens that write no common line, under loom: every order of threads and of their stores (a minute)
	CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg loom" $(CARGO) test --release -p braidfs-sync --lib models

layers: ## imports of the engine and of the checker point one way, and in no circle
	@scripts/check-layers.sh
	@scripts/check-circles.py

deny: ## licences and advisories of the dependencies (cargo install cargo-deny)
	$(CARGO) deny check

peers: ## other people's tests and programs, one after another (an hour)
	@for peer in $(PEERS); do echo "== $$peer"; $(MAKE) --no-print-directory $$peer || exit 1; done

$(PEERS): deps
	@scripts/peers/$@.sh

xfstests: ## generic tests of the built checkout XFSTESTS=PATH, TESTS="-g quick" (an hour)
	@[ -n "$(XFSTESTS)" ] || { echo "xfstests: clone and build the suite, then: make xfstests XFSTESTS=PATH" >&2; exit 2; }
	@scripts/deps.sh && scripts/peers/xfstests.sh "$(XFSTESTS)" $(TESTS)

deps: ## checks for needed commands, installs them when root
	@scripts/deps.sh

install: build ## the binary, its helpers for mount(8) and fsck(8), the man pages
	install -D -m 755 $(TARGET)/release/braidfs $(DESTDIR)$(PREFIX)/bin/braidfs
	install -d $(DESTDIR)/sbin
	for name in $(HELPERS); do ln -sf $(PREFIX)/bin/braidfs $(DESTDIR)/sbin/$$name; done
	rm -f $(OLD_PAGES)
	$(TARGET)/release/braidfs man $(DESTDIR)$(PREFIX)/share/man/man8
	chmod 644 $(PAGES)

uninstall: ## what install did
	rm -f $(DESTDIR)$(PREFIX)/bin/braidfs $(PAGES) $(OLD_PAGES)
	for name in $(HELPERS); do rm -f $(DESTDIR)/sbin/$$name; done

clean: ## removes target/
	$(CARGO) clean
