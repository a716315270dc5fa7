/* A log that several threads append to, each record durable before its thread goes on; syncs overlap.
 *
 *     cc log.c -pthread $(pkg-config --cflags --libs braidfs) -o log && ./log vol.img
 */
#include <braidfs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, RECORDS = 50, SIZE = 128 };

static braidfs_file *log_file;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int synced, failed;

static int64_t ok(int64_t result)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s\n", strerror((int)-result), braidfs_error());
		exit(1);
	}
	return result;
}

/* Called by a thread of the library. */
static void done(void *context, int result)
{
	(void)context;
	pthread_mutex_lock(&lock);
	synced++;
	failed += result != 0;
	pthread_cond_signal(&changed);
	pthread_mutex_unlock(&lock);
}

static void *appender(void *context)
{
	char record[SIZE];
	memset(record, 'a' + (int)(intptr_t)context, sizeof record);
	record[SIZE - 1] = '\n';
	for (int i = 0; i < RECORDS; i++) {
		if (ok(braidfs_write(log_file, record, sizeof record)) != SIZE)
			exit(1);
		if (i % 10)
			ok(braidfs_fsync(log_file, 1));
		else
			ok(braidfs_fsync_start(log_file, 1, done, NULL));
	}
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	const char *image = argv[1];
	braidfs_volume *volume;
	ok(braidfs_format(image, 64 << 20, NULL));
	ok(braidfs_open(&image, 1, NULL, &volume));
	ok(braidfs_file_open(volume, "log", BRAIDFS_O_RDWR | BRAIDFS_O_CREAT | BRAIDFS_O_APPEND, 0600, &log_file));

	pthread_t threads[THREADS];
	for (intptr_t t = 0; t < THREADS; t++)
		if (pthread_create(&threads[t], NULL, appender, (void *)t))
			return 1;
	for (int t = 0; t < THREADS; t++)
		pthread_join(threads[t], NULL);
	pthread_mutex_lock(&lock);
	while (synced < THREADS * RECORDS / 10)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);

	/* each record whole, none lost */
	int count[THREADS] = {0};
	char record[SIZE], same[SIZE];
	for (int64_t at = 0; ok(braidfs_pread(log_file, record, SIZE, at)) == SIZE; at += SIZE) {
		memset(same, record[0], SIZE - 1);
		same[SIZE - 1] = '\n';
		int t = record[0] - 'a';
		if (t < 0 || t >= THREADS || memcmp(same, record, SIZE))
			return 1;
		count[t]++;
	}
	for (int t = 0; t < THREADS; t++)
		if (count[t] != RECORDS)
			return 1;
	ok(braidfs_file_close(log_file));
	ok(braidfs_close(volume));
	printf("%d records, %d syncs without waiting, %d failed\n", THREADS * RECORDS, synced, failed);
	return failed != 0;
}
