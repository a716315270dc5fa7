/* Every function of the library, what it answers, and what it refuses; compiled and run by tests/c.rs. */
#include <braidfs.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <dirent.h>

/* what callers have compiled in */
_Static_assert(sizeof(struct braidfs_time) == 16, "time");
_Static_assert(sizeof(struct braidfs_stat) == 144, "stat");
_Static_assert(sizeof(struct braidfs_statvfs) == 80, "statvfs");
_Static_assert(sizeof(struct braidfs_dirent) == 272, "dirent");

#define IS(wanted, call) is(__LINE__, #call, (wanted), (call))

static int wrong;

static void is(int line, const char *what, int64_t wanted, int64_t got)
{
	if (wanted != got) {
		fprintf(stderr, "line %d: %s: %lld, not %lld (%s)\n", line, what, (long long)got, (long long)wanted, braidfs_error());
		wrong = 1;
	}
}

static void set_true(void *context, int result)
{
	*(volatile int *)context = result == 0 ? 1 : 2;
}

static void names(braidfs_volume *v)
{
	struct braidfs_stat st;
	char buffer[64];
	IS(0, braidfs_mkdir(v, "d", 0777));
	IS(-EEXIST, braidfs_mkdir(v, "d", 0777));
	IS(0, braidfs_mkdir_all(v, "/a/b/c"));
	IS(0, braidfs_mkdir_all(v, "a/b/c"));
	IS(0, braidfs_stat(v, "d", 0, &st));
	IS(S_IFDIR | 0755, st.mode); /* the umask */
	IS(geteuid(), st.uid);
	IS(-ENOENT, braidfs_stat(v, "no", 0, &st));
	IS(-ENOENT, braidfs_stat(v, "", 0, &st));
	IS(0, braidfs_symlink(v, "b/c", "a/link"));
	IS(3, braidfs_readlink(v, "a/link", NULL, 0));
	IS(3, braidfs_readlink(v, "a/link", buffer, sizeof buffer));
	IS(0, memcmp(buffer, "b/c", 3));
	IS(-ERANGE, braidfs_readlink(v, "a/link", buffer, 2));
	IS(-EINVAL, braidfs_readlink(v, "a", buffer, 2));
	IS(0, braidfs_stat(v, "a/link", BRAIDFS_NOFOLLOW, &st));
	IS(1, S_ISLNK(st.mode));
	IS(0, braidfs_stat(v, "a/link", 0, &st));
	IS(1, S_ISDIR(st.mode));
	IS(-ENOTEMPTY, braidfs_rmdir(v, "a"));
	IS(-EISDIR, braidfs_unlink(v, "d"));
	IS(0, braidfs_rename(v, "d", "e", 0));
	IS(-EEXIST, braidfs_rename(v, "e", "a", BRAIDFS_RENAME_NOREPLACE));
	IS(0, braidfs_rename(v, "e", "a", BRAIDFS_RENAME_EXCHANGE));
	IS(0, braidfs_stat(v, "e/b/c", 0, &st));
	IS(-EINVAL, braidfs_rename(v, "e", "a", 8));
	IS(-EINVAL, braidfs_rename(v, "e", "a", BRAIDFS_RENAME_EXCHANGE | BRAIDFS_RENAME_WHITEOUT));
	IS(-EEXIST, braidfs_rename(v, "e", "a", BRAIDFS_RENAME_NOREPLACE | BRAIDFS_RENAME_WHITEOUT));
	IS(0, braidfs_rename(v, "e", "w", BRAIDFS_RENAME_NOREPLACE | BRAIDFS_RENAME_WHITEOUT));
	IS(0, braidfs_stat(v, "e", 0, &st));
	IS(1, S_ISCHR(st.mode) && !(st.mode & 07777) && !st.rdev);
	IS(0, braidfs_unlink(v, "e"));
	IS(0, braidfs_rename(v, "w", "e", BRAIDFS_RENAME_WHITEOUT));
	IS(0, braidfs_unlink(v, "w"));
	IS(0, braidfs_remove_all(v, "e"));
	IS(0, braidfs_rmdir(v, "a"));
	IS(-ENOENT, braidfs_remove_all(v, "a"));
	char *name = malloc(5001);
	memset(name, 'x', 5000);
	name[5000] = 0;
	IS(-ENAMETOOLONG, braidfs_mkdir(v, name, 0777));
	name[256] = 0;
	IS(-ENAMETOOLONG, braidfs_mkdir(v, name, 0777));
	name[255] = 0;
	IS(0, braidfs_mkdir(v, name, 0777));
	braidfs_dir *dir;
	struct braidfs_dirent e;
	IS(0, braidfs_opendir(v, "/", &dir));
	IS(1, braidfs_readdir(dir, &e));
	IS(255, e.name_length);
	IS(0, strcmp(e.name, name));
	IS(DT_DIR, e.type);
	IS(0, braidfs_readdir(dir, &e));
	IS(0, braidfs_readdir(dir, &e));
	IS(-EBUSY, braidfs_close(v));
	IS(0, braidfs_closedir(dir));
	IS(0, braidfs_rmdir(v, name));
	free(name);
	IS(0, braidfs_mkdir(v, "many", 0777));
	for (int i = 0; i < 300; i++) {
		snprintf(buffer, sizeof buffer, "many/%d", i);
		IS(0, braidfs_mkdir(v, buffer, 0777));
	}
	IS(0, braidfs_opendir(v, "many", &dir));
	int count = 0;
	while (braidfs_readdir(dir, &e) == 1)
		count++;
	IS(300, count);
	IS(0, braidfs_closedir(dir));
	IS(0, braidfs_remove_all(v, "many"));
}

static void pinned(braidfs_volume *v)
{
	braidfs_file *f;
	braidfs_pinned *p, *none;
	const struct braidfs_piece *pieces;
	char zeros[4096] = {0};
	IS(0, braidfs_file_open(v, "p", BRAIDFS_O_RDWR | BRAIDFS_O_CREAT, 0666, &f));
	IS(4096, braidfs_pwrite(f, zeros, 4096, 0));
	IS(5, braidfs_pwrite(f, "hello", 5, 8190));
	IS(4105, braidfs_read_pinned(f, 1 << 20, 4090, &p));
	IS(3, braidfs_pinned_pieces(p, &pieces));
	IS(6, pieces[0].size);
	IS(4096, pieces[1].size);
	IS(0, memcmp(pieces[1].data, zeros, 4094));
	IS(0, memcmp(pieces[2].data, "llo", 3));
	IS(sizeof(struct iovec), sizeof(struct braidfs_piece));
	IS(offsetof(struct iovec, iov_len), offsetof(struct braidfs_piece, size));
	/* it is as it was */
	IS(5, braidfs_pwrite(f, "HELLO", 5, 8190));
	IS(0, braidfs_ftruncate(f, 0));
	IS(0, memcmp(pieces[2].data, "llo", 3));
	IS(0, braidfs_read_pinned(f, 10, 0, &none));
	IS(0, braidfs_pinned_pieces(none, &pieces));
	IS(0, braidfs_unpin(none));
	IS(-EINVAL, braidfs_read_pinned(f, 10, -1, &none));
	IS(-EFAULT, braidfs_read_pinned(f, 10, 0, NULL));
	IS(-EFAULT, braidfs_read_pinned(NULL, 10, 0, &none));
	IS(-EFAULT, braidfs_pinned_pieces(NULL, &pieces));
	IS(-EFAULT, braidfs_pinned_pieces(p, NULL));
	IS(0, braidfs_ftruncate(f, INT64_C(1) << 40));
	IS(-ENOMEM, braidfs_read_pinned(f, SIZE_MAX / 2, 0, &none));
	IS(0, braidfs_file_close(f));
	IS(-EBUSY, braidfs_close(v));
	IS(0, braidfs_unpin(p));
	IS(0, braidfs_unpin(NULL));
	IS(0, braidfs_unlink(v, "p"));
}

static void files(braidfs_volume *v)
{
	braidfs_file *f, *g;
	struct braidfs_stat st;
	char buffer[64];
	IS(-ENOENT, braidfs_file_open(v, "f", BRAIDFS_O_RDWR, 0, &f));
	IS(-EINVAL, braidfs_file_open(v, "f", BRAIDFS_O_RDONLY | BRAIDFS_O_CREAT, 0, &f));
	IS(-EINVAL, braidfs_file_open(v, "f", BRAIDFS_O_RDWR | 0x80000000u, 0, &f));
	IS(-EINVAL, braidfs_file_open(v, "f", BRAIDFS_O_RDWR | BRAIDFS_O_WRONLY, 0, &f));
	IS(-EINVAL, braidfs_file_open(v, "f", BRAIDFS_O_RDWR | BRAIDFS_O_EXCL, 0, &f));
	IS(0, braidfs_file_open(v, "f", BRAIDFS_O_RDWR | BRAIDFS_O_CREAT | BRAIDFS_O_EXCL, 0666, &f));
	IS(-EEXIST, braidfs_file_open(v, "f", BRAIDFS_O_RDWR | BRAIDFS_O_CREAT | BRAIDFS_O_EXCL, 0666, &g));
	IS(5, braidfs_write(f, "hello", 5));
	IS(0, braidfs_lseek(f, 0, BRAIDFS_SEEK_SET));
	IS(5, braidfs_read(f, buffer, sizeof buffer));
	IS(0, memcmp(buffer, "hello", 5));
	IS(0, braidfs_read(f, buffer, sizeof buffer));
	IS(3, braidfs_lseek(f, -2, BRAIDFS_SEEK_END));
	IS(-EINVAL, braidfs_lseek(f, -4, BRAIDFS_SEEK_CUR));
	IS(-EINVAL, braidfs_lseek(f, 0, 9));
	IS(6, braidfs_pwrite(f, "world!", 6, 1 << 20));
	IS(6, braidfs_pread(f, buffer, sizeof buffer, 1 << 20));
	IS(-EINVAL, braidfs_pread(f, buffer, sizeof buffer, -1));
	IS(-EINVAL, braidfs_pread(f, buffer, SIZE_MAX, 0));
	IS(-EFBIG, braidfs_pwrite(f, "x", 1, INT64_MAX));
	IS(0, braidfs_pread(f, NULL, 0, 0));
	IS(-EFAULT, braidfs_pread(f, NULL, 1, 0));
	IS(-EFAULT, braidfs_pwrite(f, NULL, 1, 0));
	IS(1 << 20, braidfs_lseek(f, 4096, BRAIDFS_SEEK_DATA));
	IS(4096, braidfs_lseek(f, 0, BRAIDFS_SEEK_HOLE));
	IS(-ENXIO, braidfs_lseek(f, 2 << 20, BRAIDFS_SEEK_DATA));
	IS(0, braidfs_fallocate(f, 0, 2 << 20, 4096));
	IS(0, braidfs_fallocate(f, BRAIDFS_FALLOC_PUNCH_HOLE | BRAIDFS_FALLOC_KEEP_SIZE, 0, 4096));
	IS(-EOPNOTSUPP, braidfs_fallocate(f, BRAIDFS_FALLOC_PUNCH_HOLE, 0, 4096));
	IS(1, braidfs_pread(f, buffer, 1, 0));
	IS(0, buffer[0]);
	IS(0, braidfs_fstat(f, &st));
	IS((2 << 20) + 4096, st.size);
	IS(S_IFREG | 0644, st.mode);
	IS(0, braidfs_ftruncate(f, 7));
	IS(-EINVAL, braidfs_ftruncate(f, -1));
	IS(0, braidfs_truncate(v, "f", 5));
	IS(0, braidfs_fsync(f, 0));
	IS(0, braidfs_fsync(f, 1));
	IS(0, braidfs_fadvise(f, 0, 0, BRAIDFS_FADV_SEQUENTIAL));
	IS(0, braidfs_fadvise(f, 0, 0, BRAIDFS_FADV_RANDOM));
	IS(0, braidfs_fadvise(f, 2, 0, BRAIDFS_FADV_WILLNEED));
	IS(0, braidfs_fadvise(f, 1 << 20, 1 << 20, BRAIDFS_FADV_WILLNEED));
	IS(0, braidfs_fadvise(f, 0, 0, BRAIDFS_FADV_NORMAL));
	IS(-EINVAL, braidfs_fadvise(f, 0, 0, 4));
	IS(-EINVAL, braidfs_fadvise(f, -1, 0, BRAIDFS_FADV_WILLNEED));
	volatile int done = 0;
	IS(0, braidfs_fsync_start(f, 0, set_true, (void *)&done));
	while (!done)
		usleep(1000);
	IS(1, done);
	IS(-EFAULT, braidfs_fsync_start(f, 0, NULL, NULL));
	uint64_t room = 0;
	IS(0, braidfs_room(f, &room));
	IS(1, room > 1 << 20);

	IS(0, braidfs_file_open(v, "f", BRAIDFS_O_WRONLY | BRAIDFS_O_APPEND, 0, &g));
	IS(3, braidfs_pwrite(f, "abc", 3, 5));
	IS(3, braidfs_write(g, "def", 3));
	IS(-EBADF, braidfs_read(g, buffer, 1));
	IS(0, braidfs_file_close(g));
	IS(0, braidfs_file_open(v, "f", BRAIDFS_O_RDONLY, 0, &g));
	IS(-EBADF, braidfs_write(g, "x", 1));
	IS(-EBADF, braidfs_ftruncate(g, 0));
	IS(11, braidfs_read(g, buffer, sizeof buffer));
	IS(0, memcmp(buffer + 5, "abcdef", 6));
	IS(0, braidfs_file_close(g));

	/* it lives without a name */
	IS(0, braidfs_link(v, "f", "g"));
	IS(0, braidfs_unlink(v, "f"));
	IS(0, braidfs_unlink(v, "g"));
	IS(11, braidfs_pread(f, buffer, sizeof buffer, 0));
	IS(0, braidfs_file_close(f));
	IS(0, braidfs_file_open(v, "/", BRAIDFS_O_RDONLY, 0, &f));
	IS(0, braidfs_fsync(f, 0));
	IS(-EISDIR, braidfs_read(f, buffer, 1));
	IS(0, braidfs_file_close(f));
	IS(-EISDIR, braidfs_file_open(v, "/", BRAIDFS_O_RDWR, 0, &f));
	IS(0, braidfs_symlink(v, "nowhere", "l"));
	IS(-ELOOP, braidfs_file_open(v, "l", BRAIDFS_O_RDONLY | BRAIDFS_O_NOFOLLOW, 0, &f));
	IS(0, braidfs_unlink(v, "l"));
}

static void attributes(braidfs_volume *v)
{
	struct braidfs_stat st, again;
	struct braidfs_time past = {-7, 5, 0}, omit = {0, BRAIDFS_TIME_OMIT, 0}, bad = {0, 1000000000, 0};
	struct braidfs_statvfs fs;
	char buffer[64];
	IS(0, braidfs_mkdir(v, "x", 0777));
	IS(0, braidfs_chmod(v, "x", 0700));
	IS(0, braidfs_chown(v, "x", 12, UINT32_MAX, 0));
	IS(0, braidfs_utimens(v, "x", &omit, &past, 0));
	IS(-EINVAL, braidfs_utimens(v, "x", &bad, &past, 0));
	IS(0, braidfs_stat(v, "x", 0, &st));
	IS(0, braidfs_utimens(v, "x", &omit, &omit, 0));
	IS(-ENOENT, braidfs_utimens(v, "nowhere", &omit, &omit, BRAIDFS_NOFOLLOW));
	IS(0, braidfs_stat(v, "x", 0, &again));
	IS(0, memcmp(&st, &again, sizeof st));
	IS(S_IFDIR | 0700, st.mode);
	IS(12, st.uid);
	IS(getegid(), st.gid);
	IS(-7, st.mtime.sec);
	IS(5, st.mtime.nsec);
	IS(1, st.atime.sec > 1600000000);
	IS(0, braidfs_setxattr(v, "x", "user.k", "value", 5, 0, 0));
	IS(-EEXIST, braidfs_setxattr(v, "x", "user.k", "value", 5, BRAIDFS_XATTR_CREATE, 0));
	IS(-ENODATA, braidfs_setxattr(v, "x", "user.no", "value", 5, BRAIDFS_XATTR_REPLACE, 0));
	IS(-EINVAL, braidfs_setxattr(v, "x", "user.no", "value", 5, 3, 0));
	IS(5, braidfs_getxattr(v, "x", "user.k", NULL, 0, 0));
	IS(5, braidfs_getxattr(v, "x", "user.k", buffer, sizeof buffer, 0));
	IS(0, memcmp(buffer, "value", 5));
	IS(-ERANGE, braidfs_getxattr(v, "x", "user.k", buffer, 4, 0));
	IS(-ENODATA, braidfs_getxattr(v, "x", "user.no", buffer, 4, 0));
	IS(7, braidfs_listxattr(v, "x", buffer, sizeof buffer, 0));
	IS(0, strcmp(buffer, "user.k"));
	IS(0, braidfs_removexattr(v, "x", "user.k", 0));
	IS(0, braidfs_listxattr(v, "x", buffer, sizeof buffer, 0));
	IS(0, braidfs_rmdir(v, "x"));
	IS(0, braidfs_statvfs(v, &fs));
	IS(4096, fs.block_size);
	IS(1, fs.available > 1000 && fs.available <= fs.free && fs.free <= fs.blocks);
	IS(0, braidfs_sync(v));
}

static void refusals(braidfs_volume *v, const char *image)
{
	struct braidfs_stat st;
	braidfs_volume *other = NULL;
	braidfs_file *f;
	const char *nothing[] = {NULL};
	IS(-EFAULT, braidfs_stat(NULL, "x", 0, &st));
	IS(-EFAULT, braidfs_stat(v, NULL, 0, &st));
	IS(-EFAULT, braidfs_stat(v, "/", 0, NULL));
	IS(-EINVAL, braidfs_stat(v, "/", 2, &st));
	IS(-EFAULT, braidfs_file_open(v, "/", 0, 0, NULL));
	IS(-EFAULT, braidfs_file_open(NULL, "/", 0, 0, &f));
	IS(-EFAULT, braidfs_fsync(NULL, 0));
	IS(-EFAULT, braidfs_open(nothing, 1, NULL, &other));
	IS(-EFAULT, braidfs_open(NULL, 1, NULL, &other));
	IS(-EFAULT, braidfs_open(&image, 1, NULL, NULL));
	IS(-EINVAL, braidfs_open(NULL, 0, NULL, &other));
	IS(-EINVAL, braidfs_open(&image, 1, "no-such-option", &other));
	IS(1, strstr(braidfs_error(), "no-such-option") != NULL);
	IS(-EINVAL, braidfs_open(&image, 1, "\xff", &other));
	IS(-EBUSY, braidfs_open(&image, 1, NULL, &other)); /* it is open here */
	IS(-EEXIST, braidfs_format(image, 64 << 20, NULL));
	IS(-EINVAL, braidfs_open_memory(4096, NULL, &other));
	IS(0, braidfs_close(NULL));
	IS(0, braidfs_file_close(NULL));
	IS(0, braidfs_closedir(NULL));
	IS(1, strlen(braidfs_version()) > 0);

	/* a child has nothing of it: above all it does not write */
	IS(0, braidfs_file_open(v, "forked", BRAIDFS_O_RDWR | BRAIDFS_O_CREAT, 0600, &f));
	pid_t child = fork();
	if (child == 0) {
		int bad = braidfs_pwrite(f, "x", 1, 0) != -EBADF || braidfs_mkdir(v, "child", 0700) != -EBADF ||
			braidfs_file_close(f) != -EBADF || braidfs_close(v) != -EBADF;
		braidfs_volume *own;
		bad |= braidfs_open_memory(16 << 20, NULL, &own) || braidfs_mkdir(own, "d", 0700) || braidfs_close(own);
		/* by a signal: valgrind would count as lost what the threads that stayed with the parent have */
		if (!bad)
			kill(getpid(), SIGKILL);
		_exit(1);
	}
	int status = -1;
	waitpid(child, &status, 0);
	IS(SIGKILL, WIFSIGNALED(status) ? WTERMSIG(status) : -1);
	IS(1, braidfs_pwrite(f, "x", 1, 0));
	IS(0, braidfs_file_close(f));
}

int main(int argc, char **argv)
{
	braidfs_volume *v;
	if (argc != 2)
		return 2;
	const char *image = argv[1];
	IS(0, *braidfs_error());
	IS(-ENOENT, braidfs_open(&image, 1, NULL, &v));
	IS(-EINVAL, braidfs_format(image, 1 << 20, NULL));
	IS(-EINVAL, braidfs_format(image, 64 << 20, "domains=x"));
	IS(0, braidfs_format(image, 64 << 20, "label=c,domains=2"));
	IS(0, braidfs_open(&image, 1, "noatime,commit=1,umask=022", &v));
	names(v);
	files(v);
	pinned(v);
	attributes(v);
	refusals(v, image);
	IS(0, braidfs_close(v));

	IS(0, braidfs_open(&image, 1, "ro", &v));
	struct braidfs_stat st;
	IS(0, braidfs_stat(v, "forked", 0, &st));
	IS(-ENOENT, braidfs_stat(v, "child", 0, &st));
	IS(-EROFS, braidfs_mkdir(v, "d", 0777));
	IS(0, braidfs_close(v));
	return wrong;
}
