/* Tests of the VFS, and the program that is killed:
 *   test all IMAGE                     makes it
 *   test crash IMAGE JOURNAL [first]   until it is killed, notes each transaction that SQLite has said to be committed
 *   test verify IMAGE JOURNAL NOTED
 *   test extension LIBRARY             twice prints 1 and 2 */
#include "braidfs_sqlite.h"
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static braidfs_volume *volume;

#define CHECK(what) \
	do { \
		if (!(what)) { \
			fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #what, braidfs_error()); \
			exit(1); \
		} \
	} while (0)

static sqlite3 *open_at(const char *path, int flags)
{
	sqlite3 *db;
	int rc = sqlite3_open_v2(path, &db, flags | SQLITE_OPEN_URI, "braidfs");
	if (rc) {
		fprintf(stderr, "%s: %s\n", path, sqlite3_errmsg(db));
		exit(1);
	}
	return db;
}

static sqlite3 *open_db(const char *path)
{
	return open_at(path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE);
}

static void run(sqlite3 *db, const char *sql)
{
	char *why = NULL;
	if (sqlite3_exec(db, sql, NULL, NULL, &why)) {
		fprintf(stderr, "%s: %s\n", sql, why);
		exit(1);
	}
}

/* The first column of the first row, as text, or the error. */
static const char *ask(sqlite3 *db, const char *sql)
{
	static _Thread_local char text[256];
	sqlite3_stmt *s;
	int rc = sqlite3_prepare_v2(db, sql, -1, &s, NULL);
	if (rc == SQLITE_OK)
		rc = sqlite3_step(s);
	if (rc == SQLITE_ROW)
		snprintf(text, sizeof text, "%s", (const char *)sqlite3_column_text(s, 0));
	else
		snprintf(text, sizeof text, "%s", rc == SQLITE_DONE ? "" : sqlite3_errstr(rc));
	sqlite3_finalize(s);
	return text;
}

static int is(sqlite3 *db, const char *sql, const char *wanted)
{
	const char *answer = ask(db, sql);
	if (!strcmp(answer, wanted))
		return 1;
	fprintf(stderr, "%s: %s, not %s\n", sql, answer, wanted);
	return 0;
}

static void every_journal(void)
{
	static const char *modes[] = {"delete", "truncate", "persist", "memory", "wal", "off"};
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
		char path[64], pragma[64];
		snprintf(path, sizeof path, "/dir/%s.db", modes[i]);
		snprintf(pragma, sizeof pragma, "pragma journal_mode=%s", modes[i]);
		sqlite3 *db = open_db(path);
		CHECK(is(db, pragma, modes[i]));
		run(db, "create table t(a integer primary key, b text); create index i on t(b)");
		run(db, "begin; with recursive n(x) as (select 1 union all select x+1 from n where x<3000)"
			" insert into t select x, hex(randomblob(50)) from n; commit");
		if (strcmp(modes[i], "off")) {
			/* more than the cache holds: a rollback has to read the journal */
			run(db, "pragma cache_size=10; begin; update t set b = 'x' || b; delete from t where a % 3 = 0; rollback");
			CHECK(is(db, "select count(*) from t where b not like 'x%'", "3000"));
		}
		run(db, "delete from t where a % 2; vacuum");
		sqlite3 *other = open_db(path);
		CHECK(is(other, "select count(*) from t", "1500") && is(other, "pragma integrity_check", "ok"));
		CHECK(sqlite3_close(other) == SQLITE_OK && sqlite3_close(db) == SQLITE_OK);
		db = open_at(path, SQLITE_OPEN_READONLY);
		CHECK(is(db, "select count(*) from t", "1500"));
		CHECK(is(db, "delete from t", "attempt to write a readonly database"));
		sqlite3_close(db);
	}
}

static int locks(sqlite3 *db, int wanted)
{
	int level = -1;
	return sqlite3_file_control(db, "main", SQLITE_FCNTL_LOCKSTATE, &level) == SQLITE_OK && level == wanted;
}

static void locks_hold(void)
{
	sqlite3 *a = open_db("/dir/locks.db"), *b = open_db("/dir/locks.db");
	run(a, "pragma journal_mode=delete; create table t(a); insert into t values (1)");
	run(a, "begin immediate; insert into t values (2)");
	CHECK(locks(a, SQLITE_LOCK_RESERVED));
	CHECK(is(b, "select count(*) from t", "1"));
	CHECK(is(b, "begin immediate", "database is locked"));
	/* a reader holds the commit up, and a writer that waits lets no new reader in */
	run(b, "begin; select * from t");
	CHECK(locks(b, SQLITE_LOCK_SHARED));
	CHECK(is(a, "commit", "database is locked") && locks(a, SQLITE_LOCK_PENDING));
	sqlite3 *c = open_db("/dir/locks.db");
	CHECK(is(c, "select count(*) from t", "database is locked"));
	run(b, "commit");
	run(a, "commit");
	CHECK(is(c, "select count(*) from t", "2") && locks(a, SQLITE_LOCK_NONE));
	/* in WAL a reader keeps its snapshot */
	run(b, "begin; select * from t");
	CHECK(is(a, "pragma journal_mode=wal", "database is locked"));
	run(b, "commit");
	CHECK(is(a, "pragma journal_mode=wal", "wal"));
	sqlite3_close(c);
	run(b, "begin; select * from t");
	run(a, "insert into t values (3)");
	CHECK(is(b, "select count(*) from t", "2"));
	CHECK(is(b, "insert into t values (4)", "database is locked"));
	run(b, "commit");
	CHECK(is(b, "select count(*) from t", "3"));
	CHECK(is(a, "pragma wal_checkpoint(truncate)", "0"));
	sqlite3_close(a);
	sqlite3_close(b);
}

enum { THREADS = 4, ROWS = 25 };

static void *inserter(void *mode)
{
	sqlite3 *db = open_db("/dir/threads.db");
	sqlite3_busy_timeout(db, 60000);
	(void)mode;
	for (int i = 0; i < ROWS; i++) {
		run(db, "begin immediate; update sum set n = n + 1; insert into t select n from sum; commit");
		CHECK(is(db, "select (select n from sum) = (select count(*) from t)", "1"));
	}
	sqlite3_close(db);
	return NULL;
}

static void threads(const char *mode)
{
	pthread_t thread[THREADS];
	char pragma[64];
	sqlite3 *db = open_db("/dir/threads.db");
	snprintf(pragma, sizeof pragma, "pragma journal_mode=%s", mode);
	CHECK(is(db, pragma, mode));
	run(db, "pragma synchronous=off; drop table if exists t; drop table if exists sum;"
		"create table t(a unique); create table sum(n); insert into sum values (0)");
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&thread[i], NULL, inserter, NULL));
	for (int i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	CHECK(is(db, "select count(*) = 100 and max(a) = 100 from t", "1") && is(db, "pragma integrity_check", "ok"));
	sqlite3_close(db);
}

static int there(const char *path)
{
	struct braidfs_stat st;
	return braidfs_stat(volume, path, BRAIDFS_NOFOLLOW, &st) == 0;
}

static void names(void)
{
	CHECK(braidfs_symlink(volume, "dir/../dir/real.db", "/link.db") == 0);
	sqlite3 *db = open_db("/link.db");
	run(db, "pragma journal_mode=persist; create table t(a); insert into t values (1)");
	CHECK(there("/dir/real.db-journal") && !there("/link.db-journal"));
	/* the same inode by another name: the same locks */
	sqlite3 *other = open_db("/dir/./real.db");
	run(db, "begin immediate");
	CHECK(is(other, "begin immediate", "database is locked"));
	run(db, "commit");
	/* what SQLite wants without a name leaves none */
	run(db, "pragma temp_store=file; pragma cache_size=5; create temp table big(x);"
		"with recursive n(x) as (select 1 union all select x+1 from n where x<5000)"
		" insert into big select hex(randomblob(100)) from n; create index temp.bigi on big(x)");
	run(db, "attach '/dir/second.db' as second; begin; create table second.t(a); insert into main.t values (2);"
		"insert into second.t values (2); commit; detach second");
	braidfs_dir *dir;
	struct braidfs_dirent entry;
	CHECK(braidfs_opendir(volume, "/", &dir) == 0);
	while (braidfs_readdir(dir, &entry) == 1)
		CHECK(!strcmp(entry.name, "dir") || !strcmp(entry.name, "link.db"));
	braidfs_closedir(dir);
	CHECK(sqlite3_close(db) == SQLITE_OK && sqlite3_close(other) == SQLITE_OK);
	CHECK(sqlite3_open_v2("/none/x.db", &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, "braidfs") == SQLITE_CANTOPEN);
	sqlite3_close(db);
	CHECK(sqlite3_open_v2("/dir", &db, SQLITE_OPEN_READWRITE, "braidfs") == SQLITE_CANTOPEN);
	sqlite3_close(db);
}

static void full(void)
{
	sqlite3 *db = open_db("/dir/full.db");
	run(db, "pragma journal_mode=wal; create table t(a); insert into t values (1)");
	CHECK(is(db, "with recursive n(x) as (select 1 union all select x+1 from n where x<5000) insert into t select zeroblob(65536) from n",
		"database or disk is full"));
	CHECK(is(db, "pragma integrity_check", "ok") && is(db, "select count(*) from t", "1"));
	sqlite3_close(db);
}

static void begin(const char *image, int make)
{
	if (make)
		CHECK(braidfs_format(image, 64 << 20, NULL) == 0);
	/* no commit by itself: only what SQLite has synced survives */
	CHECK(braidfs_open(&image, 1, "commit=3600,noatime", &volume) == 0);
	CHECK(braidfs_sqlite_register("braidfs", volume, 0) == SQLITE_OK);
	/* the locks of one would mean nothing to the other */
	CHECK(braidfs_sqlite_register("other", volume, 0) == SQLITE_MISUSE && !sqlite3_vfs_find("other"));
}

static void end(void)
{
	CHECK(braidfs_sqlite_unregister("braidfs") == SQLITE_OK);
	CHECK(braidfs_close(volume) == 0);
}

static sqlite3 *noted(const char *mode)
{
	char pragma[64];
	sqlite3 *db = open_db("/noted.db");
	snprintf(pragma, sizeof pragma, "pragma journal_mode=%s", mode);
	CHECK(is(db, pragma, mode));
	run(db, "pragma synchronous=full");
	return db;
}

/* Until it is killed. */
static void crash(const char *mode)
{
	sqlite3 *db = noted(mode);
	run(db, "create table if not exists t(a integer primary key, b blob)");
	for (long n = atol(ask(db, "select coalesce(max(a), 0) from t"));; n++) {
		char sql[128];
		snprintf(sql, sizeof sql, "insert into t values (%ld, randomblob(%ld)); ", n + 1, 100 + n * 37 % 9000);
		run(db, sql);
		printf("%ld\n", n + 1);
		fflush(stdout);
	}
}

static void verify(const char *mode, const char *last)
{
	sqlite3 *db = noted(mode);
	CHECK(is(db, "pragma integrity_check", "ok"));
	long found = atol(ask(db, "select count(*) from t")), highest = atol(ask(db, "select max(a) from t"));
	if (found != highest || found < atol(last) || found > atol(last) + 1) {
		fprintf(stderr, "%s: %s transactions were committed, %ld are there, up to %ld\n", mode, last, found, highest);
		exit(1);
	}
	sqlite3_close(db);
}

/* The extension opens the volume of BRAIDFS_VOLUME. */
static void extension(const char *library)
{
	sqlite3 *db;
	char *why = NULL;
	CHECK(sqlite3_open(":memory:", &db) == SQLITE_OK);
	CHECK(sqlite3_enable_load_extension(db, 1) == SQLITE_OK);
	if (sqlite3_load_extension(db, library, NULL, &why)) {
		fprintf(stderr, "%s\n", why);
		exit(1);
	}
	sqlite3_close(db);
	db = open_db("file:/extension.db?psow=0");
	run(db, "create table if not exists t(a); insert into t values (1)");
	int powersafe = -1;
	CHECK(sqlite3_file_control(db, "main", SQLITE_FCNTL_POWERSAFE_OVERWRITE, &powersafe) == SQLITE_OK && powersafe == 0);
	printf("%s\n", ask(db, "select count(*) from t"));
	sqlite3_close(db);
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	if (!strcmp(argv[1], "extension")) {
		extension(argv[2]);
		return 0;
	}
	int all = !strcmp(argv[1], "all");
	begin(argv[2], all || (argc > 4 && !strcmp(argv[4], "first")));
	if (all) {
		CHECK(braidfs_mkdir(volume, "/dir", 0700) == 0);
		every_journal();
		locks_hold();
		threads("delete");
		threads("wal");
		names();
		full();
	} else if (!strcmp(argv[1], "crash") && argc > 3) {
		crash(argv[3]);
	} else if (!strcmp(argv[1], "verify") && argc > 4) {
		verify(argv[3], argv[4]);
	} else {
		return 2;
	}
	end();
	puts("ok");
	return 0;
}
