/* SQL on whatever is below it: `bench mount DIRECTORY JOURNAL SYNCHRONOUS` by SQLite's own VFS, or `bench library DEVICE ...`
 * by that of braidfs. Prints one line for each load: its name and operations a second. */
#include "braidfs_sqlite.h"
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static sqlite3 *db;
static sqlite3_stmt *insert, *point, *change;
static uint64_t seed = 0x9e3779b97f4a7c15u;

static void ok(int rc, const char *what)
{
	if (rc != SQLITE_OK && rc != SQLITE_DONE && rc != SQLITE_ROW) {
		fprintf(stderr, "%s: %s\n", what, sqlite3_errmsg(db));
		exit(1);
	}
}

static void run(const char *sql)
{
	ok(sqlite3_exec(db, sql, NULL, NULL, NULL), sql);
}

static unsigned chance(unsigned below)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (unsigned)(seed % below);
}

static sqlite3_stmt *prepare(const char *sql)
{
	sqlite3_stmt *s;
	ok(sqlite3_prepare_v2(db, sql, -1, &s, NULL), sql);
	return s;
}

static int step(sqlite3_stmt *s, int key)
{
	sqlite3_bind_int(s, 1, key);
	int rc = sqlite3_step(s);
	ok(rc, sqlite3_sql(s));
	sqlite3_reset(s);
	return rc == SQLITE_ROW;
}

static int rows;

static void insert_one(void)
{
	step(insert, ++rows);
}

static void insert_batch(void)
{
	run("begin");
	for (int i = 0; i < 500; i++)
		insert_one();
	run("commit");
}

static void read_one(void)
{
	if (!step(point, 1 + (int)chance((unsigned)rows)))
		exit(1);
}

static void change_one(void)
{
	step(change, 1 + (int)chance((unsigned)rows));
}

/* Four reads and one change in a transaction. */
static void mixed(void)
{
	run("begin");
	for (int i = 0; i < 4; i++)
		read_one();
	change_one();
	run("commit");
}

static void load(const char *name, void (*one)(void), int times)
{
	struct timespec a, b;
	clock_gettime(CLOCK_MONOTONIC, &a);
	for (int i = 0; i < times; i++)
		one();
	clock_gettime(CLOCK_MONOTONIC, &b);
	printf("%s %.1f\n", name, times / ((double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9));
}

int main(int argc, char **argv)
{
	char path[4096], sql[256];
	braidfs_volume *volume = NULL;
	if (argc != 5)
		return 2;
	int library = !strcmp(argv[1], "library");
	const char *device = argv[2];
	if (library && (braidfs_open(&device, 1, NULL, &volume) || braidfs_sqlite_register("braidfs", volume, 0))) {
		fprintf(stderr, "%s: %s\n", device, braidfs_error());
		return 1;
	}
	snprintf(path, sizeof path, "%s/bench.db", library ? "" : argv[2]);
	ok(sqlite3_open_v2(path, &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, library ? "braidfs" : NULL), path);
	/* a small cache of SQLite's: reads reach the file system */
	snprintf(sql, sizeof sql, "pragma journal_mode=%s; pragma synchronous=%s; pragma cache_size=-256", argv[3], argv[4]);
	run(sql);
	run("drop table if exists t; create table t(k integer primary key, v blob, n integer)");
	insert = prepare("insert into t values (?1, randomblob(200), 0)");
	point = prepare("select v, n from t where k = ?1");
	change = prepare("update t set n = n + 1, v = randomblob(200) where k = ?1");
	load("insert,one-a-transaction", insert_one, 400);
	load("insert,500-a-transaction", insert_batch, 40);
	load("read,by-key", read_one, 20000);
	load("update,one-a-transaction", change_one, 400);
	load("4-reads+1-update", mixed, 400);
	sqlite3_finalize(insert);
	sqlite3_finalize(point);
	sqlite3_finalize(change);
	ok(sqlite3_close(db), "close");
	if (library && (braidfs_sqlite_unregister("braidfs") || braidfs_close(volume))) {
		fprintf(stderr, "close: %s\n", braidfs_error());
		return 1;
	}
	return 0;
}
