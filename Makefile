# braidfs: `make help` lists the targets.
CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
# where mount(8) and fsck(8) look for helpers, and systemd and udev for what is theirs
SBINDIR ?= /sbin
LIBDIR ?= /lib
TARGET := $(or $(CARGO_TARGET_DIR),target)
# The program that is installed and packed.
BUILT ?= $(TARGET)/release/braidfs
PEERS := pjdfstest fsx stress-ng postgres rocksdb sqlite dbench big
# What mkfs(8), mount(8), umount(8) and fsck(8) look for. The last ones by the type that the kernel shows, at a remount
# and at an unmount.
HELPERS := mkfs.braidfs mount.braidfs umount.braidfs fsck.braidfs \
	mount.fuse.braidfs mount.fuseblk.braidfs umount.fuse.braidfs umount.fuseblk.braidfs
# Built together with the command, what both use is built once, as the command has it.
CONFLICTS_TOOL := $(CARGO) build --release -p braidfs-cli -p braidfs-conflicts && $(TARGET)/release/braidfs-conflicts
CONFLICTS := $(CONFLICTS_TOOL) run
SHARE := $(DESTDIR)$(PREFIX)/share
MAN := $(SHARE)/man
# The C library: its name in the file system is what crates/capi/build.rs tells the linker.
LIB := $(DESTDIR)$(PREFIX)/lib
SONAME := libbraidfs.so.0
# With the library that cargo has built for its own tests or, at last, by itself.
PYTHON_UNIT := BRAIDFS_LIBRARY=$(abspath $(TARGET))/debug/deps/libbraidfs_c.so PYTHONPATH=python PYTHONDONTWRITEBYTECODE=1 \
	python3 -m unittest discover -s python/tests -p test_braidfs.py
# The commit that `make semver` compares with.
BASELINE ?= $(shell sed -n 's/^[0-9a-f]\{40\}$$/&/p' scripts/api-baseline)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
# Patterns are the shell's: the pages are there only after the first line of the recipe.
NAMES := braidfs.8 braidfs-*.8 mkfs.braidfs.8 mount.braidfs.8 umount.braidfs.8 fsck.braidfs.8
PAGES := $(addprefix $(MAN)/man8/,$(NAMES)) $(MAN)/man5/braidfs.5
# Where earlier versions put them.
OLD_PAGES := $(addprefix $(MAN)/man1/,$(NAMES))
# What people type, and the helper that `braidfs completions SHELL` wants to know, if it is one.
TYPED := mkfs.braidfs umount.braidfs fsck.braidfs
BASH_COMPLETIONS := $(SHARE)/bash-completion/completions
ZSH_COMPLETIONS := $(SHARE)/zsh/site-functions
FISH_COMPLETIONS := $(SHARE)/fish/vendor_completions.d
COMPLETIONS := $(foreach c,braidfs $(TYPED),$(BASH_COMPLETIONS)/$(c) $(ZSH_COMPLETIONS)/_$(c) $(FISH_COMPLETIONS)/$(c).fish)
DOC := $(SHARE)/doc/braidfs
UDEV_RULE := $(DESTDIR)$(LIBDIR)/udev/rules.d/60-braidfs.rules
UNITS := $(addprefix $(DESTDIR)$(LIBDIR)/systemd/system/,braidfs-scrub@.service braidfs-scrub@.timer braidfs-fsck@.service braidfs@.service)

.DEFAULT_GOAL := help
.PHONY: help build demo bench test fmt clippy doc api unit unit-programs unit-then-mounts heavy heavy-beside mount-built heavy-long semver as-built lib-as-built top-picture dashboard-picture watch-cost watch-instructions request-instructions crash planted mount mount-ring aging conflicts conflicts-part conflicts-planted conflicts-bless projection ablations ablations-test fill coherence opens million ten-million xfstests soak fuzz fuzz-coverage layers site models deny peers $(PEERS) deps deps-test lib wheel python python-built python-unit install install-lib uninstall deb deb-test deb-test-built dist blkid-test recovery-bench figures lock-waits times postgres-rates sync-bench resize-kill device-kill tenant-kill tenant-set-kill tenant-rates supervise-kills supervise-peers upgrade-rounds upgrade-peers upgrade-from small-files dist-test clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z$$()A-Z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo "  make NAME           with NAME one of $(PEERS): that program on a mounted braidfs"

build: ## the release binary, target/release/braidfs
	$(CARGO) build --release -p braidfs-cli

lib: ## the C library, target/release/libbraidfs_c.so and .a (docs/embedding.md)
	$(CARGO) build --release -p braidfs-capi

# The wheel's library is that of the system that it is built on.
wheel: lib ## the Python package with the C library in it, target/wheel/braidfs-*.whl (pip fetches setuptools)
	rm -rf $(TARGET)/wheel && mkdir -p $(TARGET)/wheel
	cp -r python $(TARGET)/wheel/source
	install -m 755 -s $(TARGET)/release/libbraidfs_c.so $(TARGET)/wheel/source/braidfs/libbraidfs.so
	python3 -m pip wheel -q --no-deps -w $(TARGET)/wheel $(TARGET)/wheel/source

python: lib ## tests of the wheel with fsspec, pandas and pyarrow, in target/venv (pip fetches them; two minutes)
	@scripts/python-tests.sh $(TARGET)/release/libbraidfs_c.so

python-built: ## the same with the library that was built for the tests; says so where pip can fetch nothing
	@scripts/python-tests.sh $(TARGET)/debug/deps/libbraidfs_c.so --or-skip

python-unit: ## tests of the Python package that need no other package
	$(CARGO) build -p braidfs-capi
	$(PYTHON_UNIT)

demo: ## real work on a braidfs beside an ext4, a killed daemon, a table (under 3 minutes)
	@scripts/deps.sh --demo && python3 scripts/demo.py

bench: ## library speed beside tmpfs and ext4, device traffic, memory (as root; 2 minutes)
	$(CARGO) run --release -p braidfs-cli -- bench speed
	$(CARGO) test --release -p braidfs --test traffic --test memory -- --ignored --nocapture

small-files: deps ## copy and removal of the demo's files by each transport and profile beside ext4, ROUNDS rounds (default 3; 4 minutes; root)
	@python3 scripts/small-files.py --rounds $(or $(ROUNDS),3)

aging: deps ## file systems that age: filled to 70 to 95 %, overwritten and churned, beside ext4, XFS, btrfs; JSON=FILE, DOCS=1, AGING="--size 4G" (as root; an hour)
	@command -v mkfs.xfs mkfs.btrfs | grep -q btrfs || scripts/deps.sh xfsprogs btrfs-progs
	$(CARGO) run --release -p braidfs-cli -- bench aging -o $(or $(JSON),$(TARGET)/aging.json) $(if $(DOCS),--docs docs) $(AGING)

# Mounted is what cargo has built for the tests: nothing more to compile, and it checks the order of its locks and asserts.
# Mount tests, and those of the packages, wait half of their time: the heavy tests have what they leave of the cores.
# What is skipped is noted in a file of this run, and listed at its end.
test: export BRAIDFS_SKIPS := $(abspath $(TARGET))/skipped-$(shell echo $$PPID).txt
test: deps-test layers api fmt clippy doc unit-programs ## everything that must pass before a change goes in (20 to 25 minutes on two cores, compiling included; BRAIDFS_NO_SKIP=1: and run)
	@$(MAKE) --no-print-directory -j2 unit-then-mounts heavy-beside
	@scripts/skipped.py list

fmt: ## is everything formatted
	$(CARGO) fmt --all --check

clippy: ## lints, warnings are errors
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy -p braidfs-sync --all-targets --features lock-waits -- -D warnings
	$(CARGO) clippy -p braidfs-testkit --all-targets --features schedule,planted-bugs -- -D warnings

doc: ## the documentation of the two public crates, warnings are errors
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --no-deps -p braidfs-fs -p braidfs

UNIT := $(CARGO) test --workspace --exclude braidfs-testkit

unit: ## tests of all crates but the heavy ones
	@scripts/test-programs.py $(UNIT)
	$(CARGO) test -p braidfs-sync --features lock-waits --lib waits
	$(PYTHON_UNIT)

unit-programs:
	$(UNIT) --no-run

# The conflict checker has what the test kit needs of the engine, so that there is one less to compile.
HEAVY := $(CARGO) test --profile heavy -p braidfs-testkit -p braidfs-conflicts --features braidfs-testkit/planted-bugs

heavy: ## model, crash and thread tests, optimised, with bugs on purpose that they must find; shared cache lines, a part
	@scripts/test-programs.py $(HEAVY)

# Programs whose tests compare times begin last (scripts/test-programs.py), and have the machine to themselves then.
# What is known to take longest is left to `make heavy`, or a part of what that does of it, unless the caller says how much.
LEFT_TO_HEAVY := planted,planted_scratch,threads_pressed,crash_threads,crash_writeback,scratch,resize
heavy-beside: export BRAIDFS_CRASH_STATES ?= 60000
heavy-beside: export BRAIDFS_HARD_STEP ?= 12
heavy-beside: export BRAIDFS_CRASH_SECOND ?= 48
heavy-beside: export BRAIDFS_MODEL_OPS ?= 20000
heavy-beside: export BRAIDFS_DAMAGE_ONE_OF ?= 10
heavy-beside:
	@nice -n 19 scripts/test-programs.py --leave $(LEFT_TO_HEAVY) $(HEAVY)

unit-then-mounts:
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory mount-built
	@$(MAKE) --no-print-directory -j2 python-built deb-test-built

mount-built:
	BRAIDFS_BIN=$(TARGET)/debug/braidfs python3 scripts/test-mount.py --jobs 2

heavy-long: ## the same with twenty times the crash states and ten times the model's operations (an hour)
	BRAIDFS_CRASH_STATES=3000000 BRAIDFS_CRASH_SECONDS=3000 BRAIDFS_MODEL_OPS=400000 BRAIDFS_DAMAGE_ONE_OF=1 BRAIDFS_HARD_STEP=1 \
		BRAIDFS_CRASH_DEEP=1 BRAIDFS_CRASH_SECOND=1 BRAIDFS_THREAD_RUNS=3000 BRAIDFS_PROGRAM_SECONDS=12000 \
		$(MAKE) --no-print-directory heavy

crash: ## every crash workload, for hours; interrupt it, the same command goes on
	$(CARGO) run --profile crash -p braidfs-testkit --features schedule --bin crash -- full

planted: ## does the crash explorer see bugs on purpose
	$(CARGO) run --release -p braidfs-testkit --features planted-bugs --bin crash -- planted
	$(HEAVY) --test planted --test planted_shared --test planted_pieces --test planted_bucket --test planted_clock --test planted_resize --test planted_scratch --test planted_moves --test planted_apart --test planted_sync

mount: ## tests on a mounted volume (needs /dev/fuse, else it says so and skips)
	@python3 scripts/test-mount.py

mount-ring: ## the same through io_uring (turns the kernel's switch on for that time; root)
	@python3 scripts/test-mount.py --ring

conflicts: deps ## cache lines that threads share: 19 tests x 2 to 32 workers, JSON=FILE, BLESS=1, DOCS=1 (4 minutes)
	$(CONFLICTS) $(if $(JSON),--json $(JSON)) $(if $(BLESS),--bless) $(if $(DOCS),--docs docs)

conflicts-part: ## a part of it, 7 tests with 2 and 8 workers (half a minute behind compiling)
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
	@for s in gate slots cells arcs leader all; do echo "== BRAIDFS_ABLATION=$$s"; export BRAIDFS_ABLATION=$$s; \
		$(CARGO) test --release -p braidfs --lib && \
		$(CARGO) test --release -p braidfs-testkit --features schedule --test threads || exit 1; done

recovery-bench: ## 32 domains with full journals of 32 MiB after a crash: the mount by one and by two threads, RECOVERY_IMAGE=FILE; then 8 beside ext4 with one journal as large (root; some minutes; an idle machine)
	RECOVERY_IMAGE=$(abspath $(or $(RECOVERY_IMAGE),$(TARGET)/recovery.img)) $(CARGO) test --release -p braidfs --test recovery_bench -- --ignored --nocapture
	$(CARGO) run --release -p braidfs-cli -- bench times recovery -t ext4,library

lock-waits: deps ## tables of the papers: which locks threads wait for, and how long, JSON=FILE, DOCS=1 (as root; a minute; wants an idle machine)
	$(CARGO) run --release -p braidfs-cli --features lock-waits -- bench figures spanfs-1-locks spanfs-3-locks fast18-2-locks \
		-o $(or $(JSON),$(TARGET)/lock-waits.json) $(if $(DOCS),--docs docs)

figures: deps ## figures of the papers behind braidfs in one interleaved run, JSON=FILE, DOCS=1, FIGURES="max-11 --size 2G" (as root; 10 minutes; wants an idle machine)
	@command -v mkfs.xfs >/dev/null || scripts/deps.sh xfsprogs
	$(CARGO) run --release -p braidfs-cli -- bench figures -o $(or $(JSON),$(TARGET)/figures.json) $(if $(DOCS),--docs docs) $(FIGURES)

times: deps ## mount after a crash, GC beside a load, remount, checkpoint, beside ext4 and XFS, JSON=FILE, DOCS=1, TIMES="gc --files 3200000" (as root; 6 minutes; wants an idle machine)
	@command -v mkfs.xfs >/dev/null || scripts/deps.sh xfsprogs
	$(CARGO) run --release -p braidfs-cli -- bench times -o $(or $(JSON),$(TARGET)/times.json) $(if $(DOCS),--docs docs) $(or $(TIMES),recovery gc remount commit)

postgres-rates: deps ## pgbench by number of clients on braidfs, ext4 and XFS, ROUNDS rounds (default 3), DOCS=docs (as root; 5 minutes; wants an idle machine)
	@scripts/pg-rates.sh

sync-bench: ## syncs of 1 to 64 threads on a device whose flush takes 200 µs, with helpers of commits and without (2 minutes; wants an idle machine)
	@$(CARGO) test --release -p braidfs --test sync_speed -- --ignored --nocapture
	@BRAIDFS_ABLATION=leader $(CARGO) test --release -p braidfs --test sync_speed -- --ignored --nocapture

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

resize-kill: ## kill -9 at random moments while volumes become larger or smaller, ROUNDS (default 200; 5 minutes)
	@python3 scripts/resizing.py $(or $(ROUNDS),200)

device-kill: ## kill -9 at random moments while devices come to volumes, are drained and leave them, ROUNDS (default 200; 8 minutes)
	@python3 scripts/devices_killed.py $(or $(ROUNDS),200)

tenant-kill: ## kill -9 at random moments while tenants are made, changed and removed, ROUNDS (default 200; 5 minutes)
	@python3 scripts/tenants_killed.py $(or $(ROUNDS),200)

tenant-set-kill: ## kill -9 at random moments while a tenant moves to other devices, ROUNDS (default 200; 15 minutes)
	@python3 scripts/tenant_devices_killed.py $(or $(ROUNDS),200)

tenant-rates: ## rates of tenants of a mounted volume in real time, SECONDS each (default 10; 2 minutes): the machine must be quiet
	@python3 scripts/tenant-rates.py $(or $(SECONDS),10)

supervise-kills: ## kill -9 of a supervised mount's process under load, KILLS times (default 100; 2 minutes)
	@SUPERVISE_KILLS=$(or $(KILLS),100) python3 scripts/test-mount.py killed_under_load_and_mounted_again

supervise-peers: ## the same under PostgreSQL and git, which are started again after each kill, KILLS times (default 100; 25 minutes; root)
	@scripts/supervise-peers.sh

upgrade-rounds: ## braidfs upgrade under load, ROUNDS times (default 100; 3 minutes)
	@UPGRADE_ROUNDS=$(or $(ROUNDS),100) python3 scripts/test-mount.py upgraded_under_load

upgrade-peers: ## the same under PostgreSQL and git, ROUNDS times (default 100; 3 minutes; root)
	@scripts/upgrade-peers.sh

upgrade-from: ## upgrades to and from the program of another revision under load, REV=REVISION (builds it; root; 5 minutes)
	$(CARGO) build -p braidfs-cli
	@REV="$(REV)" ROUNDS="$(ROUNDS)" scripts/upgrade-from.py

soak: ## random load with kill -9 and remount every few seconds (SOAK_SECONDS, default 60)
	@python3 scripts/soak.py

million: ## a million files in one directory: does a file cost more then? library, mount, ext4 (5 minutes)
	$(CARGO) test --release -p braidfs --test million -- --ignored --nocapture --exact a_million_files_cost_as_much_each_as_a_hundred_thousand
	@python3 scripts/million.py

ten-million: ## ten million files in a tree: cost of each, memory, mount after a crash, fsck; library, mount, ext4 (root; an hour)
	$(CARGO) test --release -p braidfs --test million -- --ignored --nocapture --exact ten_million_files_in_a_tree_cost_as_much_each_as_the_first
	@python3 scripts/million.py --tree

fuzz: ## all fuzz targets with the built-in mutator, FUZZ_SECONDS each (default 60)
	$(CARGO) run --profile fuzz -p braidfs-fuzz --bin braidfs-fuzz -- --seconds $(or $(FUZZ_SECONDS),60)

fuzz-coverage: ## the same under libFuzzer, which looks for new code (cargo install cargo-fuzz)
	@scripts/fuzz-coverage.sh

top-picture: build ## pictures of `braidfs top` over a mount with a load on it, docs/top-*.svg (root; a minute)
	@scripts/top-picture.py

dashboard-picture: build ## docs/dashboard.svg, the dashboard's queries asked of a Prometheus over a mount with a load (root; a minute)
	@command -v prometheus >/dev/null || scripts/deps.sh prometheus
	@scripts/dashboard-picture.py

watch-cost: build ## what counting, watching, metrics and slow= cost small requests, interleaved, ROUNDS (default 10; root; 3 minutes; an idle machine)
	@scripts/watch-cost.py $(or $(ROUNDS),10)

watch-instructions: build ## the same in instructions that the server executes for a request, which a busy machine does not change (valgrind; root; 5 minutes)
	@command -v valgrind >/dev/null || scripts/deps.sh valgrind
	@scripts/watch-cost.py --instructions

request-instructions: build ## what each kind of request costs in instructions of the server, which a busy machine does not change; ROUNDS (default 1), JSON=FILE, BEFORE=FILE (valgrind; root; 4 minutes)
	@command -v valgrind >/dev/null || scripts/deps.sh valgrind
	@scripts/request-instructions.py --rounds $(or $(ROUNDS),1) $(if $(JSON),--json $(JSON)) $(if $(BEFORE),--compare $(BEFORE))

semver: ## what has changed in the interfaces of braidfs-fs and braidfs since BASELINE (default: the one in scripts/api-baseline), by cargo-semver-checks (5 minutes)
	@command -v cargo-semver-checks >/dev/null || { echo "cargo-semver-checks is missing: cargo install cargo-semver-checks" >&2; exit 1; }
	$(CARGO) semver-checks -p braidfs-fs -p braidfs --baseline-rev "$(BASELINE)"

api: ## are the public interfaces, of Rust and of C, what crates/{fs,engine,capi}/api.txt say; BLESS=1 writes these anew
	@scripts/check-api.py $(if $(BLESS),--bless)

models: ## locks, look-ups and opens that write no common line, under loom: every order of threads and of their stores (a minute)
	CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg loom" $(CARGO) test --release -p braidfs-sync --lib models

layers: ## imports of the engine and of the checker point one way, and in no circle; links between pages lead somewhere
	@scripts/check-layers.sh
	@scripts/check-circles.py
	@scripts/check-links.py

site: ## the documentation as a site, target/site (needs mdbook: cargo install mdbook)
	@command -v mdbook >/dev/null || { echo "mdbook is missing: cargo install mdbook" >&2; exit 1; }
	@scripts/check-links.py && scripts/site.py

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

deps-test: ## the same, and what some tests need, which skip without
	@scripts/deps.sh --tests

# Whoever is root may have no cargo, which rustup gives to one user: then what that user has built is installed.
HAVE_CARGO := $(shell command -v $(firstword $(CARGO)))
REPOSITORY := $(shell sed -n 's/^repository = "\(.*\)"/\1/p' Cargo.toml)

as-built: NEEDED = $(BUILT)
lib-as-built: NEEDED = $(TARGET)/release/libbraidfs_c.so
as-built lib-as-built:
	@[ -e $(NEEDED) ] || { echo "install: $(NEEDED) is not there, and $(firstword $(CARGO)) is not in the path of $$(id -un):" \
		"run \`make $(if $(filter lib%,$@),lib,build)\` as a user who has it, then this again" >&2; exit 1; }
	@echo "install: $(firstword $(CARGO)) is not in the path of $$(id -un), so nothing is built: $(NEEDED) of $$(date -r $(NEEDED) '+%F %R') is installed"

install: $(if $(HAVE_CARGO),build,as-built) ## the binary, helpers for mount(8) and fsck(8), man pages, documentation, completions, udev rule, systemd units
	install -D -m 755 $(BUILT) $(DESTDIR)$(PREFIX)/bin/braidfs
	install -d $(DESTDIR)$(SBINDIR) $(BASH_COMPLETIONS) $(ZSH_COMPLETIONS) $(FISH_COMPLETIONS) $(dir $(UDEV_RULE) $(UNITS))
	for name in $(HELPERS); do ln -sf $(PREFIX)/bin/braidfs $(DESTDIR)$(SBINDIR)/$$name; done
	rm -f $(OLD_PAGES)
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.toml)} $(BUILT) man $(MAN)
	chmod 644 $(PAGES)
	for name in "" $(TYPED); do c=$${name:-braidfs}; b="$(BUILT) completions"; \
		$$b bash $$name >$(BASH_COMPLETIONS)/$$c && $$b zsh $$name >$(ZSH_COMPLETIONS)/_$$c && \
		$$b fish $$name >$(FISH_COMPLETIONS)/$$c.fish || exit 1; done
	sed 's|@BINDIR@|$(PREFIX)/bin|' dist/udev/60-braidfs.rules.in >$(UDEV_RULE)
	for unit in $(UNITS); do in=dist/systemd/$${unit##*/}; [ -e $$in ] || in=$$in.in; \
		sed 's|@BINDIR@|$(PREFIX)/bin|' $$in >$$unit || exit 1; done
	chmod 644 $(COMPLETIONS) $(UDEV_RULE) $(UNITS)
	install -D -m 644 dist/magic $(SHARE)/braidfs/magic
	install -d $(DOC)/tutorials
	install -m 644 docs/*.md docs/*.svg $(DOC)
	install -m 644 docs/tutorials/*.md $(DOC)/tutorials
	sed -i 's|](\.\./|]($(REPOSITORY)/blob/HEAD/|g' $(patsubst docs/%,$(DOC)/%,$(wildcard docs/*.md)) # to what is not installed

install-lib: $(if $(HAVE_CARGO),lib,lib-as-built) ## the C library, its header, and what pkg-config says of it
	install -D -m 755 -s $(TARGET)/release/libbraidfs_c.so $(LIB)/$(SONAME)
	ln -sf $(SONAME) $(LIB)/libbraidfs.so
	install -m 644 $(TARGET)/release/libbraidfs_c.a $(LIB)/libbraidfs.a && strip -g $(LIB)/libbraidfs.a
	install -D -m 644 include/braidfs.h $(DESTDIR)$(PREFIX)/include/braidfs.h
	install -d $(LIB)/pkgconfig
	sed 's,@PREFIX@,$(PREFIX),; s,@VERSION@,$(VERSION),' crates/capi/braidfs.pc.in > $(LIB)/pkgconfig/braidfs.pc
	if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi # else programs do not find it

uninstall: ## what install did
	rm -f $(DESTDIR)$(PREFIX)/bin/braidfs $(PAGES) $(OLD_PAGES) $(COMPLETIONS) $(UDEV_RULE) $(UNITS) $(SHARE)/braidfs/magic
	rm -f $(addprefix $(LIB)/,$(SONAME) libbraidfs.so libbraidfs.a pkgconfig/braidfs.pc) $(DESTDIR)$(PREFIX)/include/braidfs.h
	rmdir $(SHARE)/braidfs 2>/dev/null || true
	rm -f $(patsubst docs/%,$(DOC)/%,$(wildcard docs/*.md docs/*.svg docs/tutorials/*.md))
	rmdir $(DOC)/tutorials $(DOC) 2>/dev/null || true
	for name in $(HELPERS); do rm -f $(DESTDIR)$(SBINDIR)/$$name; done

deb: build ## the Debian package, target/deb/braidfs_VERSION_ARCH.deb
	@scripts/deb.sh

deb-test: build ## the package in a fresh Debian: install, mkfs, fstab, reboot, upgrade, purge (root, network; 3 minutes)
	@scripts/deb-test.sh

dist: ## the release tarball of what is committed, target/braidfs-VERSION.tar.gz
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1); mkdir -p $(TARGET) && \
		git archive --format=tar.gz --prefix=braidfs-$$version/ -o $(TARGET)/braidfs-$$version.tar.gz HEAD && \
		echo $(TARGET)/braidfs-$$version.tar.gz

dist-test: dist ## the tarball unpacked, `cargo install` of it, mkfs, cp, fsck and resize by what that installed (5 minutes)
	@scripts/dist-test.sh $(TARGET)/braidfs-$(VERSION).tar.gz

deb-test-built: ## the same with the program that was built for the tests, without lintian where that is not there; says so where it cannot
	@BUILT=$(TARGET)/debug/braidfs scripts/deb-test.sh --or-skip

blkid-test: build ## util-linux built with our prober for libblkid: blkid, findfs, wipefs on volumes (network; a minute)
	@scripts/blkid-test.sh

clean: ## removes target/
	$(CARGO) clean
