/* braidfs.h: a braidfs volume in this process, without a mount and without the kernel in between.
 *
 * Link with `pkg-config --cflags --libs braidfs`. docs/embedding.md has the whole story; examples are in
 * crates/capi/examples.
 *
 * Errors.    Every function that can fail answers a negative errno (-ENOENT, ...; Linux numbers). braidfs_error() has a text
 *            for the last failure of the calling thread. Functions that count answer the number, 0 or more.
 * Threads.   A volume, a file or a listing may be used by any number of threads at once; calls on different files do not
 *            wait for each other. A close ends a handle: no other call may use it at that time, or afterwards. A file
 *            has one position, which braidfs_read, _write and _lseek share and lock; braidfs_pread and _pwrite use none.
 * Processes. A volume is locked: one process has it open for writing, or several have it open with `ro`. After fork() the
 *            child's copies of handles answer -EBADF, closes included; it may open volumes of its own, once the parent
 *            has closed them. Locks of the devices live on in the descriptors that the child has copies of: after the
 *            parent has ended they are held until the child calls exec or ends. Nothing is to be called in a signal handler.
 * Users.     There are no permission checks: who may write the devices may do everything. What is made belongs to the
 *            options uid= and gid=, by default to the process.
 * Paths      start at the root of the volume, with or without a slash, and are any bytes but zero; at most 4096 of them,
 *            255 for a name. Options are UTF-8.
 * Pointers   that are null where something is needed are refused with -EFAULT, lengths beyond the address space with
 *            -EINVAL. A handle that was closed, or never opened, cannot be told from a good one.
 * Durability is that of a mount: what was synced survives a crash, names included; else the last commit (5 s).
 * Panics     of the library do not leave it: the call answers -ENOTRECOVERABLE, and so does each later one. Closing
 *            a volume writes nothing more, and answers that, too, but commits in the background go on until then (every 5 s):
 *            end the process at once. What was not durable is lost then, as in a crash; a new process recovers the volume when
 *            it opens it.
 *
 * The interface is the library's soname: functions and constants may be added to it, nothing else changes.
 */
#ifndef BRAIDFS_H
#define BRAIDFS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An open volume, file, listing; what was read without a copy. */
typedef struct braidfs_volume braidfs_volume;
typedef struct braidfs_file braidfs_file;
typedef struct braidfs_dir braidfs_dir;
typedef struct braidfs_pinned braidfs_pinned;

/* Flags of braidfs_file_open: exactly one of the first three. These are numbers of braidfs, not those of <fcntl.h>. */
#define BRAIDFS_O_RDONLY 0x0u
#define BRAIDFS_O_WRONLY 0x1u
#define BRAIDFS_O_RDWR 0x2u
#define BRAIDFS_O_CREAT 0x40u /* made where it is not there */
#define BRAIDFS_O_EXCL 0x80u /* with CREAT: -EEXIST where it is there */
#define BRAIDFS_O_TRUNC 0x200u /* emptied where it is there */
#define BRAIDFS_O_APPEND 0x400u /* braidfs_write goes to the end, wherever others have moved it */
#define BRAIDFS_O_NOFOLLOW 0x20000u /* a symlink at the end is refused */

/* Flags of calls by path: a symlink at the end itself. */
#define BRAIDFS_NOFOLLOW 0x1u

/* braidfs_rename. A whiteout is a character device 0:0, with which an overlayfs hides the old name; it may go with NOREPLACE. */
#define BRAIDFS_RENAME_NOREPLACE 0x1u
#define BRAIDFS_RENAME_EXCHANGE 0x2u
#define BRAIDFS_RENAME_WHITEOUT 0x4u

/* braidfs_lseek */
#define BRAIDFS_SEEK_SET 0u
#define BRAIDFS_SEEK_CUR 1u
#define BRAIDFS_SEEK_END 2u
#define BRAIDFS_SEEK_DATA 3u
#define BRAIDFS_SEEK_HOLE 4u

/* braidfs_fadvise */
#define BRAIDFS_FADV_NORMAL 0u
#define BRAIDFS_FADV_RANDOM 1u
#define BRAIDFS_FADV_SEQUENTIAL 2u
#define BRAIDFS_FADV_WILLNEED 3u

/* braidfs_fallocate */
#define BRAIDFS_FALLOC_KEEP_SIZE 0x1u
#define BRAIDFS_FALLOC_PUNCH_HOLE 0x2u /* with KEEP_SIZE */
#define BRAIDFS_FALLOC_COLLAPSE_RANGE 0x8u
#define BRAIDFS_FALLOC_ZERO_RANGE 0x10u
#define BRAIDFS_FALLOC_INSERT_RANGE 0x20u

/* braidfs_setxattr */
#define BRAIDFS_XATTR_CREATE 0x1u
#define BRAIDFS_XATTR_REPLACE 0x2u

/* Nanoseconds that stand for the present time, and for leaving a time as it is. */
#define BRAIDFS_TIME_NOW 0x3fffffffu
#define BRAIDFS_TIME_OMIT 0x3ffffffeu

struct braidfs_time {
	int64_t sec; /* since 1970, may be negative */
	uint32_t nsec; /* 0 to 999999999 */
	uint32_t reserved;
};

struct braidfs_stat {
	uint64_t ino;
	uint64_t size; /* bytes */
	uint64_t blocks; /* 512-byte units that it has on the devices */
	uint64_t rdev;
	uint32_t mode; /* type and permissions, as st_mode */
	uint32_t nlink;
	uint32_t uid;
	uint32_t gid;
	struct braidfs_time atime;
	struct braidfs_time mtime;
	struct braidfs_time ctime;
	struct braidfs_time btime; /* birth */
	uint64_t reserved[4];
};

struct braidfs_statvfs {
	uint64_t block_size; /* bytes; the unit of the next three */
	uint64_t blocks;
	uint64_t free;
	uint64_t available; /* what all domains together can still write */
	uint64_t inodes;
	uint64_t inodes_free;
	uint64_t reserved[4];
};

/* Bytes of a file where the cache has them, laid out as a struct iovec. */
struct braidfs_piece {
	const void *data; /* at most 4096 bytes, not to be written */
	size_t size;
};

struct braidfs_dirent {
	uint64_t ino;
	uint32_t type; /* as d_type: DT_REG, DT_DIR, DT_LNK, ... */
	uint32_t name_length;
	char name[256]; /* with a zero byte behind it */
};

/* The text of the last failure of this thread, "" where there was none; valid until another call fails. Never null. */
const char *braidfs_error(void);
const char *braidfs_version(void);

/* Makes an image file of `size` bytes (16 MiB at least) and a volume in it. -EEXIST where something is there: `braidfs mkfs`
 * formats devices. Options, or null: label=TEXT, domains=N, group-size=BYTES, inline=BYTES, journal=BYTES, mlogs=N,
 * placement=dirs|spread|inherit, data-checksums; commas between them. */
int braidfs_format(const char *image, uint64_t size, const char *options);

/* Opens the volume on `count` image files, block devices or NBD exports (nbd://HOST/EXPORT), all that it
 * has. Options, or null: those of mount.braidfs(8) that mean something here (ro, rw, noatime, relatime, strictatime,
 * nodiratime, lazytime, discard, nodefrag, commit=SECONDS, data=ordered|journal|writeback, overwrite=auto|log, cache=BYTES,
 * numa=auto|off), readahead=BYTES (1M; what a file reads at once where it reads in a row) and uid=, gid=, umask=OCTAL (022).
 * commit= and cache= take any number, 0 for the default; a mount takes no more than 300 seconds, and no less than 8M. */
int braidfs_open(const char *const *devices, size_t count, const char *options, braidfs_volume **volume);

/* A new volume of `size` bytes in memory, for tests: it is gone when it is closed. */
int braidfs_open_memory(uint64_t size, const char *options, braidfs_volume **volume);

/* Makes all durable and closes the volume. -EBUSY while files or listings are open: the volume is open as before. With any
 * other error it is closed, and what was not synced may be lost. Null is fine, here and in the other closes. */
int braidfs_close(braidfs_volume *volume);

/* When it returns, everything survives a crash. */
int braidfs_sync(const braidfs_volume *volume);
int braidfs_statvfs(const braidfs_volume *volume, struct braidfs_statvfs *out);

/* Names. braidfs_remove_all removes a directory with all below it, following no symlink. */
int braidfs_mkdir(const braidfs_volume *volume, const char *path, uint32_t mode);
int braidfs_mkdir_all(const braidfs_volume *volume, const char *path);
int braidfs_rmdir(const braidfs_volume *volume, const char *path);
int braidfs_unlink(const braidfs_volume *volume, const char *path);
int braidfs_remove_all(const braidfs_volume *volume, const char *path);
int braidfs_rename(const braidfs_volume *volume, const char *from, const char *to, uint32_t flags);
int braidfs_link(const braidfs_volume *volume, const char *original, const char *link);
int braidfs_symlink(const braidfs_volume *volume, const char *target, const char *link);

/* The length of the target, without a zero byte. With `size` 0 nothing is written; -ERANGE where it is too small. */
int64_t braidfs_readlink(const braidfs_volume *volume, const char *path, void *buffer, size_t size);

/* Attributes. `flags`: 0 or BRAIDFS_NOFOLLOW. A uid or gid of UINT32_MAX stays. */
int braidfs_stat(const braidfs_volume *volume, const char *path, uint32_t flags, struct braidfs_stat *out);
int braidfs_chmod(const braidfs_volume *volume, const char *path, uint32_t mode);
int braidfs_chown(const braidfs_volume *volume, const char *path, uint32_t uid, uint32_t gid, uint32_t flags);
int braidfs_utimens(const braidfs_volume *volume, const char *path, const struct braidfs_time *atime, const struct braidfs_time *mtime, uint32_t flags);
int braidfs_truncate(const braidfs_volume *volume, const char *path, int64_t size);

/* Extended attributes (user.*, trusted.*, security.*, POSIX ACLs). The first answers the length of the value, the third the
 * bytes of all names, each with a zero byte behind it; with `size` 0 nothing is written. `how`: 0 or one of
 * BRAIDFS_XATTR_... */
int64_t braidfs_getxattr(const braidfs_volume *volume, const char *path, const char *attribute, void *value, size_t size, uint32_t flags);
int braidfs_setxattr(const braidfs_volume *volume, const char *path, const char *attribute, const void *value, size_t size, uint32_t how, uint32_t flags);
int64_t braidfs_listxattr(const braidfs_volume *volume, const char *path, void *names, size_t size, uint32_t flags);
int braidfs_removexattr(const braidfs_volume *volume, const char *path, const char *attribute, uint32_t flags);

/* Files. `mode`: permissions of a new one, before the umask. CREAT and TRUNC need writing. A directory can be opened with
 * RDONLY, to sync it. */
int braidfs_file_open(const braidfs_volume *volume, const char *path, uint32_t flags, uint32_t mode, braidfs_file **file);
int braidfs_file_close(braidfs_file *file);

/* Bytes read, fewer than wanted only at the end; bytes written, fewer where space ran out, or more than 1 MiB is appended. */
int64_t braidfs_pread(const braidfs_file *file, void *buffer, size_t size, int64_t offset);
int64_t braidfs_pwrite(const braidfs_file *file, const void *data, size_t size, int64_t offset);
int64_t braidfs_read(const braidfs_file *file, void *buffer, size_t size);
int64_t braidfs_write(const braidfs_file *file, const void *data, size_t size);
int64_t braidfs_lseek(const braidfs_file *file, int64_t offset, uint32_t whence);

/* braidfs_pread without a copy: the bytes read, and in *pinned what keeps them, also where they are 0. They are those of one moment,
 * and stay as they are until braidfs_unpin, whatever becomes of the file, which may be closed before; the volume may not
 * (-EBUSY). What is pinned counts as memory of the cache: -ENOMEM where it would be more than a quarter of it (of a tenant: of its
 * ceiling). braidfs_pinned_pieces answers how many pieces there are, and where, in the order of the file: holes are zeros. */
int64_t braidfs_read_pinned(const braidfs_file *file, size_t size, int64_t offset, braidfs_pinned **pinned);
int64_t braidfs_pinned_pieces(const braidfs_pinned *pinned, const struct braidfs_piece **pieces);
int braidfs_unpin(braidfs_pinned *pinned);

/* posix_fadvise. NORMAL, SEQUENTIAL and RANDOM are of all further reads of this handle, whatever the range; WILLNEED waits until
 * the range, an eighth of the cache at most, is there. */
int braidfs_fadvise(const braidfs_file *file, int64_t offset, int64_t size, uint32_t advice);

/* When it returns, the file survives a crash: its data, its attributes (with `data_only` its size alone) and every name on its
 * path; of a directory, its entries. */
int braidfs_fsync(const braidfs_file *file, int data_only);

/* The same without waiting: `done` is called once, from another thread or before this returns, with 0 or a negative errno. Those
 * who wait at the same time share a flush. Where it returns an error itself, `done` is not called. Keep the file open until then; `done` must not close the volume. */
int braidfs_fsync_start(const braidfs_file *file, int data_only, void (*done)(void *context, int result), void *context);
int braidfs_ftruncate(const braidfs_file *file, int64_t size);
int braidfs_fallocate(const braidfs_file *file, uint32_t mode, int64_t offset, int64_t size);
int braidfs_fstat(const braidfs_file *file, struct braidfs_stat *out);

/* Bytes that this file, and others in its domain, can still take. */
int braidfs_room(const braidfs_file *file, uint64_t *bytes);

/* Listings, without . and ..: 1 with an entry, 0 at the end. What is there all the time comes once. */
int braidfs_opendir(const braidfs_volume *volume, const char *path, braidfs_dir **dir);
int braidfs_readdir(const braidfs_dir *dir, struct braidfs_dirent *out);
int braidfs_closedir(braidfs_dir *dir);

#ifdef __cplusplus
}
#endif

#endif
