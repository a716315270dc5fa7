/* A VFS for SQLite on a braidfs volume in this process.
 *
 * Linked with a program (-DSQLITE_CORE, braidfs_sqlite.h), or as an extension that is loaded: braidfs_vfs.so, with the
 * volume's devices in BRAIDFS_VOLUME (colons between them) and its options in BRAIDFS_OPTIONS.
 *
 * Durability. xSync is an fsync of the library, after which the data, the size and every name on the path survive: the
 *   directory of a new rollback journal needs no sync of its own. That of a new WAL does: a rollback journal that had been
 *   removed there, and came back, would undo the database below the log. A transaction with a rollback journal is there when the journal
 *   has gone. For journal_mode=DELETE SQLite asks to sync that with synchronous=EXTRA only, because in the kernel a removed
 *   name outlives the process. Here the end of the process is like a loss of power, so that xDelete syncs the directory
 *   whenever the journal had been synced: with all but synchronous=OFF.
 * Locks are in memory, among the connections of this process: the library lets no other process open the volume.
 *   They belong to inodes, so that names of one file share them. The shared memory of WAL is on the heap, and gone with the
 *   last connection: the first one of the next process finds zeros and recovers it from the log.
 * Of the device's qualities only powersafe overwrite is claimed, as SQLite's own VFS for Unix does.
 */
#include "braidfs_sqlite.h"
#include <sqlite3ext.h>
SQLITE_EXTENSION_INIT1
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PATH_ROOM = 4096, LINKS_MAX = 100, SHM_SLOTS = SQLITE_SHM_NLOCK };

struct node;

typedef struct {
	sqlite3_vfs vfs; /* first: SQLite knows it by this */
	braidfs_volume *volume;
	sqlite3_vfs *base; /* for clocks, randomness, dlopen */
	struct node *nodes;
	char name[];
} volume_vfs;

typedef struct open_file open_file;

/* An inode with a database in it that is open. */
typedef struct node {
	struct node *next;
	uint64_t ino;
	int opens; /* under list_lock */
	pthread_mutex_t lock; /* for all below */
	int shared; /* connections with SHARED or more */
	open_file *writer; /* with RESERVED or more: at most one */
	int pending; /* it waits for readers to go, no new one comes */
	int journal_synced; /* since one was deleted */
	/* WAL */
	int shm_users;
	int regions;
	void **region;
	int slot[SHM_SLOTS]; /* -1: exclusive, else shared by so many */
} node;

struct open_file {
	sqlite3_file file; /* first: SQLite knows it by this */
	volume_vfs *on;
	braidfs_file *handle;
	node *node; /* of a database */
	uint64_t journal_of; /* inode of the database that it is the journal of, or 0 */
	char *path; /* null: it has no name */
	uint64_t ino;
	int level;
	int shm;
	unsigned shm_shared, shm_exclusive; /* slots that it has */
	int persist_wal, powersafe;
	int sync_directory; /* with its first sync */
};

/* For the lists of nodes, which change when databases are opened and closed. */
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int last_errno;

static int failed(int64_t result, int code)
{
	last_errno = (int)-result;
	if (result == -ENOSPC || result == -EDQUOT)
		return SQLITE_FULL;
	if (result == -ENOMEM)
		return SQLITE_IOERR_NOMEM;
	return code;
}

/* Files */

static int vfs_read(sqlite3_file *f, void *buffer, int size, sqlite3_int64 at)
{
	open_file *file = (open_file *)f;
	char *to = buffer;
	while (size > 0) {
		int64_t n = braidfs_pread(file->handle, to, (size_t)size, at);
		if (n < 0)
			return failed(n, SQLITE_IOERR_READ);
		if (n == 0) {
			/* SQLite relies on the zeros */
			memset(to, 0, (size_t)size);
			return SQLITE_IOERR_SHORT_READ;
		}
		to += n;
		at += n;
		size -= (int)n;
	}
	return SQLITE_OK;
}

static int vfs_write(sqlite3_file *f, const void *data, int size, sqlite3_int64 at)
{
	open_file *file = (open_file *)f;
	const char *from = data;
	while (size > 0) {
		int64_t n = braidfs_pwrite(file->handle, from, (size_t)size, at);
		if (n <= 0)
			return failed(n < 0 ? n : -ENOSPC, SQLITE_IOERR_WRITE);
		from += n;
		at += n;
		size -= (int)n;
	}
	return SQLITE_OK;
}

static int vfs_truncate(sqlite3_file *f, sqlite3_int64 size)
{
	int r = braidfs_ftruncate(((open_file *)f)->handle, size);
	return r ? failed(r, SQLITE_IOERR_TRUNCATE) : SQLITE_OK;
}

/* Tells or asks whether the journal of a database was synced since the last one was deleted. */
static int journal_synced(volume_vfs *on, uint64_t ino, int synced)
{
	int before = 0;
	pthread_mutex_lock(&list_lock);
	for (node *n = on->nodes; n; n = n->next)
		if (n->ino == ino) {
			pthread_mutex_lock(&n->lock);
			before = n->journal_synced;
			n->journal_synced = synced;
			pthread_mutex_unlock(&n->lock);
		}
	pthread_mutex_unlock(&list_lock);
	return before;
}

static int sync_parent(volume_vfs *on, const char *name)
{
	char parent[PATH_ROOM];
	const char *slash = strrchr(name, '/');
	size_t length = slash ? (size_t)(slash - name) : 0;
	braidfs_file *dir;
	if (length + 2 > sizeof parent)
		return -ENAMETOOLONG;
	memcpy(parent, name, length);
	memcpy(parent + length, length ? "" : "/", length ? 1 : 2);
	int r = braidfs_file_open(on->volume, parent, BRAIDFS_O_RDONLY, 0, &dir);
	if (r)
		return r;
	r = braidfs_fsync(dir, 0);
	int closed = braidfs_file_close(dir);
	return r ? r : closed;
}

static int vfs_sync(sqlite3_file *f, int flags)
{
	open_file *file = (open_file *)f;
	int r = braidfs_fsync(file->handle, (flags & SQLITE_SYNC_DATAONLY) != 0);
	if (file->journal_of)
		journal_synced(file->on, file->journal_of, 1);
	if (r)
		return failed(r, SQLITE_IOERR_FSYNC);
	if (file->sync_directory) {
		r = sync_parent(file->on, file->path);
		if (r)
			return failed(r, SQLITE_IOERR_DIR_FSYNC);
		file->sync_directory = 0;
	}
	return SQLITE_OK;
}

static int vfs_file_size(sqlite3_file *f, sqlite3_int64 *size)
{
	struct braidfs_stat st;
	int r = braidfs_fstat(((open_file *)f)->handle, &st);
	if (r)
		return failed(r, SQLITE_IOERR_FSTAT);
	*size = (sqlite3_int64)st.size;
	return SQLITE_OK;
}

/* Locks of a database: any number of SHARED; one RESERVED beside them; PENDING, which lets no new SHARED come; EXCLUSIVE,
 * alone. */

static int vfs_lock(sqlite3_file *f, int level)
{
	open_file *file = (open_file *)f;
	node *n = file->node;
	int rc = SQLITE_OK;
	if (!n || file->level >= level)
		return SQLITE_OK;
	pthread_mutex_lock(&n->lock);
	if (level == SQLITE_LOCK_SHARED) {
		if (n->pending)
			rc = SQLITE_BUSY;
		else
			n->shared++;
	} else if (n->writer && n->writer != file) {
		rc = SQLITE_BUSY;
	} else {
		n->writer = file;
		if (level == SQLITE_LOCK_EXCLUSIVE) {
			n->pending = 1;
			file->level = SQLITE_LOCK_PENDING;
			if (n->shared > 1)
				rc = SQLITE_BUSY;
		}
	}
	if (rc == SQLITE_OK)
		file->level = level;
	pthread_mutex_unlock(&n->lock);
	return rc;
}

static int vfs_unlock(sqlite3_file *f, int level)
{
	open_file *file = (open_file *)f;
	node *n = file->node;
	if (!n || file->level <= level)
		return SQLITE_OK;
	pthread_mutex_lock(&n->lock);
	if (n->writer == file) {
		n->writer = NULL;
		n->pending = 0;
	}
	if (level == SQLITE_LOCK_NONE)
		n->shared--;
	file->level = level;
	pthread_mutex_unlock(&n->lock);
	return SQLITE_OK;
}

static int vfs_check_reserved(sqlite3_file *f, int *reserved)
{
	node *n = ((open_file *)f)->node;
	*reserved = 0;
	if (n) {
		pthread_mutex_lock(&n->lock);
		*reserved = n->writer != NULL;
		pthread_mutex_unlock(&n->lock);
	}
	return SQLITE_OK;
}

/* Shared memory of WAL */

static int shm_lock(sqlite3_file *f, int first, int count, int flags)
{
	open_file *file = (open_file *)f;
	node *n = file->node;
	unsigned mask = ((1u << count) - 1) << first;
	int rc = SQLITE_OK;
	pthread_mutex_lock(&n->lock);
	for (int i = first; i < first + count; i++) {
		unsigned bit = 1u << i;
		if (flags & SQLITE_SHM_UNLOCK) {
			if (file->shm_exclusive & bit)
				n->slot[i] = 0;
			else if (file->shm_shared & bit)
				n->slot[i]--;
		} else if (flags & SQLITE_SHM_SHARED) {
			if (n->slot[i] < 0 && !(file->shm_exclusive & bit))
				rc = SQLITE_BUSY;
		} else if (n->slot[i] != 0 && !(file->shm_exclusive & bit)) {
			rc = SQLITE_BUSY;
		}
	}
	if (flags & SQLITE_SHM_UNLOCK) {
		file->shm_shared &= ~mask;
		file->shm_exclusive &= ~mask;
	} else if (rc == SQLITE_OK) {
		for (int i = first; i < first + count; i++) {
			unsigned bit = 1u << i;
			if (!(flags & SQLITE_SHM_SHARED)) {
				n->slot[i] = -1;
				file->shm_exclusive |= bit;
			} else if (!((file->shm_shared | file->shm_exclusive) & bit)) {
				n->slot[i]++;
				file->shm_shared |= bit;
			}
		}
	}
	pthread_mutex_unlock(&n->lock);
	return rc;
}

static int shm_map(sqlite3_file *f, int at, int size, int extend, void volatile **out)
{
	open_file *file = (open_file *)f;
	node *n = file->node;
	int rc = SQLITE_OK;
	*out = NULL;
	if (!n)
		return SQLITE_IOERR_SHMOPEN;
	pthread_mutex_lock(&n->lock);
	if (!file->shm) {
		file->shm = 1;
		n->shm_users++;
	}
	if (at >= n->regions && extend) {
		void **more = realloc(n->region, sizeof *more * (size_t)(at + 1));
		if (more) {
			n->region = more;
			while (n->regions <= at && (more[n->regions] = calloc(1, (size_t)size)))
				n->regions++;
		}
		if (at >= n->regions)
			rc = SQLITE_IOERR_NOMEM;
	}
	if (at < n->regions)
		*out = n->region[at];
	pthread_mutex_unlock(&n->lock);
	return rc;
}

static void shm_barrier(sqlite3_file *f)
{
	node *n = ((open_file *)f)->node;
	__sync_synchronize();
	/* for tools that look for races, too */
	pthread_mutex_lock(&n->lock);
	pthread_mutex_unlock(&n->lock);
}

/* There is no file to be removed. */
static int shm_unmap(sqlite3_file *f, int remove)
{
	open_file *file = (open_file *)f;
	node *n = file->node;
	(void)remove;
	if (!n || !file->shm)
		return SQLITE_OK;
	shm_lock(f, 0, SHM_SLOTS, SQLITE_SHM_UNLOCK);
	pthread_mutex_lock(&n->lock);
	file->shm = 0;
	if (--n->shm_users == 0) {
		for (int i = 0; i < n->regions; i++)
			free(n->region[i]);
		free(n->region);
		n->region = NULL;
		n->regions = 0;
	}
	pthread_mutex_unlock(&n->lock);
	return SQLITE_OK;
}

static int flag(int *value, int *argument)
{
	if (*argument >= 0)
		*value = *argument != 0;
	else
		*argument = *value;
	return SQLITE_OK;
}

static int vfs_control(sqlite3_file *f, int op, void *argument)
{
	open_file *file = (open_file *)f;
	struct braidfs_stat st;
	switch (op) {
	case SQLITE_FCNTL_LOCKSTATE:
		*(int *)argument = file->level;
		return SQLITE_OK;
	case SQLITE_FCNTL_LAST_ERRNO:
		*(int *)argument = last_errno;
		return SQLITE_OK;
	case SQLITE_FCNTL_PERSIST_WAL:
		return flag(&file->persist_wal, argument);
	case SQLITE_FCNTL_POWERSAFE_OVERWRITE:
		return flag(&file->powersafe, argument);
	case SQLITE_FCNTL_VFSNAME:
		*(char **)argument = sqlite3_mprintf("%s", file->on->vfs.zName);
		return SQLITE_OK;
	case SQLITE_FCNTL_HAS_MOVED:
		*(int *)argument = file->path && (braidfs_stat(file->on->volume, file->path, 0, &st) || st.ino != file->ino);
		return SQLITE_OK;
	default:
		return SQLITE_NOTFOUND;
	}
}

static int vfs_sector_size(sqlite3_file *f)
{
	(void)f;
	return 4096;
}

static int vfs_qualities(sqlite3_file *f)
{
	return ((open_file *)f)->powersafe ? SQLITE_IOCAP_POWERSAFE_OVERWRITE : 0;
}

static node *node_of(volume_vfs *on, uint64_t ino)
{
	node *n;
	pthread_mutex_lock(&list_lock);
	for (n = on->nodes; n && n->ino != ino; n = n->next)
		;
	if (!n && (n = calloc(1, sizeof *n))) {
		n->ino = ino;
		n->next = on->nodes;
		on->nodes = n;
		pthread_mutex_init(&n->lock, NULL);
	}
	if (n)
		n->opens++;
	pthread_mutex_unlock(&list_lock);
	return n;
}

static void give_back(volume_vfs *on, node *n)
{
	pthread_mutex_lock(&list_lock);
	if (--n->opens == 0) {
		node **at = &on->nodes;
		while (*at != n)
			at = &(*at)->next;
		*at = n->next;
		pthread_mutex_destroy(&n->lock);
		free(n);
	}
	pthread_mutex_unlock(&list_lock);
}

static int vfs_close(sqlite3_file *f)
{
	open_file *file = (open_file *)f;
	if (file->node) {
		shm_unmap(f, 0);
		vfs_unlock(f, SQLITE_LOCK_NONE);
	}
	/* before the node: as long as the inode is open no other has its number */
	if (file->node)
		give_back(file->on, file->node);
	int r = braidfs_file_close(file->handle);
	free(file->path);
	file->file.pMethods = NULL;
	return r ? failed(r, SQLITE_IOERR_CLOSE) : SQLITE_OK;
}

static const sqlite3_io_methods methods = {
	.iVersion = 2, /* without xFetch: there is nothing to map */
	.xClose = vfs_close,
	.xRead = vfs_read,
	.xWrite = vfs_write,
	.xTruncate = vfs_truncate,
	.xSync = vfs_sync,
	.xFileSize = vfs_file_size,
	.xLock = vfs_lock,
	.xUnlock = vfs_unlock,
	.xCheckReservedLock = vfs_check_reserved,
	.xFileControl = vfs_control,
	.xSectorSize = vfs_sector_size,
	.xDeviceCharacteristics = vfs_qualities,
	.xShmMap = shm_map,
	.xShmLock = shm_lock,
	.xShmBarrier = shm_barrier,
	.xShmUnmap = shm_unmap,
};

/* Names */

/* A file of its own for what SQLite wants without a name. */
static int open_unnamed(volume_vfs *on, open_file *file)
{
	char path[64];
	int r = -EEXIST;
	for (int tries = 0; tries < 16 && r == -EEXIST; tries++) {
		uint64_t random;
		sqlite3_randomness(sizeof random, &random);
		snprintf(path, sizeof path, "/.sqlite-%016llx", (unsigned long long)random);
		r = braidfs_file_open(on->volume, path, BRAIDFS_O_RDWR | BRAIDFS_O_CREAT | BRAIDFS_O_EXCL, 0600, &file->handle);
	}
	if (r == 0 && (r = braidfs_unlink(on->volume, path)) != 0)
		braidfs_file_close(file->handle);
	return r;
}

/* Journals have the permissions of their database. */
static uint32_t mode_of(open_file *file, const char *name, int flags)
{
	struct braidfs_stat st;
	if (flags & (SQLITE_OPEN_MAIN_JOURNAL | SQLITE_OPEN_WAL))
		if (braidfs_stat(file->on->volume, sqlite3_filename_database(name), 0, &st) == 0) {
			if (flags & SQLITE_OPEN_MAIN_JOURNAL)
				file->journal_of = st.ino;
			return st.mode & 0777;
		}
	return flags & SQLITE_OPEN_DELETEONCLOSE ? 0600 : 0644;
}

static int vfs_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *f, int flags, int *told)
{
	volume_vfs *on = (volume_vfs *)vfs;
	open_file *file = (open_file *)f;
	struct braidfs_stat st;
	int r;
	memset(file, 0, sizeof *file);
	file->on = on;
	file->powersafe = name && (flags & SQLITE_OPEN_URI) ? sqlite3_uri_boolean(name, "psow", 1) : 1;
	if (!name) {
		r = open_unnamed(on, file);
	} else {
		uint32_t how = flags & SQLITE_OPEN_READWRITE ? BRAIDFS_O_RDWR : BRAIDFS_O_RDONLY;
		if (flags & SQLITE_OPEN_CREATE)
			how |= BRAIDFS_O_CREAT;
		if (flags & SQLITE_OPEN_EXCLUSIVE)
			how |= BRAIDFS_O_EXCL | BRAIDFS_O_NOFOLLOW;
		if (flags & SQLITE_OPEN_NOFOLLOW)
			how |= BRAIDFS_O_NOFOLLOW;
		r = braidfs_file_open(on->volume, name, how, mode_of(file, name, flags), &file->handle);
		if ((r == -EROFS || r == -EACCES || r == -EPERM) && (flags & SQLITE_OPEN_READWRITE) && !(flags & SQLITE_OPEN_EXCLUSIVE)) {
			flags = (flags & ~(SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE)) | SQLITE_OPEN_READONLY;
			r = braidfs_file_open(on->volume, name, BRAIDFS_O_RDONLY, 0, &file->handle);
		}
	}
	if (r)
		return failed(r, SQLITE_CANTOPEN);
	r = braidfs_fstat(file->handle, &st);
	if (r == 0 && !S_ISREG(st.mode))
		r = -EISDIR;
	file->ino = st.ino;
	/* It lives as long as it is open, and a crash leaves nothing of it. */
	if (r == 0 && name && (flags & SQLITE_OPEN_DELETEONCLOSE))
		r = braidfs_unlink(on->volume, name);
	else if (r == 0 && name && !(file->path = strdup(name)))
		r = -ENOMEM;
	file->sync_directory = file->path && (flags & SQLITE_OPEN_WAL) && (flags & SQLITE_OPEN_CREATE);
	if (r == 0 && (flags & SQLITE_OPEN_MAIN_DB) && !(file->node = node_of(on, st.ino)))
		r = -ENOMEM;
	if (r) {
		free(file->path);
		braidfs_file_close(file->handle);
		return failed(r, SQLITE_CANTOPEN);
	}
	if (told)
		*told = flags;
	file->file.pMethods = &methods;
	return SQLITE_OK;
}

/* Whether this is a journal that was synced. */
static int deletes_synced(volume_vfs *on, const char *name)
{
	static const char suffix[] = "-journal";
	struct braidfs_stat st;
	char database[PATH_ROOM];
	size_t length = strlen(name), end = sizeof suffix - 1;
	if (length <= end || length >= sizeof database || strcmp(name + length - end, suffix))
		return 0;
	memcpy(database, name, length - end);
	database[length - end] = 0;
	return braidfs_stat(on->volume, database, 0, &st) == 0 && journal_synced(on, st.ino, 0);
}

static int vfs_delete(sqlite3_vfs *vfs, const char *name, int sync)
{
	volume_vfs *on = (volume_vfs *)vfs;
	int r = braidfs_unlink(on->volume, name);
	sync |= r == 0 && deletes_synced(on, name);
	if (r)
		return failed(r, r == -ENOENT ? SQLITE_IOERR_DELETE_NOENT : SQLITE_IOERR_DELETE);
	if (sync && (r = sync_parent(on, name)) != 0)
		return failed(r, SQLITE_IOERR_DIR_FSYNC);
	return SQLITE_OK;
}

static int vfs_access(sqlite3_vfs *vfs, const char *name, int flags, int *may)
{
	struct braidfs_stat st;
	int r = braidfs_stat(((volume_vfs *)vfs)->volume, name, 0, &st);
	*may = 0;
	if (r == -ENOENT || r == -ENOTDIR)
		return SQLITE_OK;
	if (r)
		return failed(r, SQLITE_IOERR_ACCESS);
	/* an empty journal is none; nothing else is checked by the library */
	*may = flags == SQLITE_ACCESS_EXISTS ? !S_ISREG(st.mode) || st.size > 0 : 1;
	return SQLITE_OK;
}

/* A path as it is built: absolute, without symlinks, . and .. */
typedef struct {
	volume_vfs *on;
	char *out;
	size_t room, length;
	int links;
} full_path;

static int add_all(full_path *p, const char *path);

static int add(full_path *p, const char *part, size_t length)
{
	struct braidfs_stat st;
	char target[PATH_ROOM];
	if (length == 0 || (length == 1 && part[0] == '.'))
		return SQLITE_OK;
	if (length == 2 && part[0] == '.' && part[1] == '.') {
		while (p->length > 0 && p->out[--p->length] != '/')
			;
		p->out[p->length] = 0;
		return SQLITE_OK;
	}
	if (p->length + length + 2 > p->room)
		return failed(-ENAMETOOLONG, SQLITE_CANTOPEN);
	size_t before = p->length;
	p->out[p->length++] = '/';
	memcpy(p->out + p->length, part, length);
	p->length += length;
	p->out[p->length] = 0;
	int r = braidfs_stat(p->on->volume, p->out, BRAIDFS_NOFOLLOW, &st);
	if (r == -ENOENT)
		return SQLITE_OK;
	if (r)
		return failed(r, SQLITE_CANTOPEN);
	if (!S_ISLNK(st.mode))
		return SQLITE_OK;
	if (++p->links > LINKS_MAX)
		return failed(-ELOOP, SQLITE_CANTOPEN);
	int64_t n = braidfs_readlink(p->on->volume, p->out, target, sizeof target - 1);
	if (n < 0)
		return failed(n, SQLITE_CANTOPEN);
	target[n] = 0;
	p->length = target[0] == '/' ? 0 : before;
	p->out[p->length] = 0;
	return add_all(p, target);
}

static int add_all(full_path *p, const char *path)
{
	while (*path) {
		size_t length = strcspn(path, "/");
		int rc = add(p, path, length);
		if (rc)
			return rc;
		path += length + (path[length] == '/');
	}
	return SQLITE_OK;
}

static int vfs_full_path(sqlite3_vfs *vfs, const char *name, int room, char *out)
{
	full_path p = {(volume_vfs *)vfs, out, (size_t)room, 0, 0};
	out[0] = 0;
	int rc = add_all(&p, name);
	if (rc == SQLITE_OK && p.length == 0)
		rc = failed(-EISDIR, SQLITE_CANTOPEN);
	return rc == SQLITE_OK && p.links > 0 ? SQLITE_OK_SYMLINK : rc;
}

/* What has nothing to do with files */

static sqlite3_vfs *base(sqlite3_vfs *vfs)
{
	return ((volume_vfs *)vfs)->base;
}

static void *vfs_dlopen(sqlite3_vfs *vfs, const char *name)
{
	return base(vfs)->xDlOpen(base(vfs), name);
}

static void vfs_dlerror(sqlite3_vfs *vfs, int room, char *text)
{
	base(vfs)->xDlError(base(vfs), room, text);
}

static void (*vfs_dlsym(sqlite3_vfs *vfs, void *library, const char *symbol))(void)
{
	return base(vfs)->xDlSym(base(vfs), library, symbol);
}

static void vfs_dlclose(sqlite3_vfs *vfs, void *library)
{
	base(vfs)->xDlClose(base(vfs), library);
}

static int vfs_randomness(sqlite3_vfs *vfs, int size, char *out)
{
	return base(vfs)->xRandomness(base(vfs), size, out);
}

static int vfs_sleep(sqlite3_vfs *vfs, int microseconds)
{
	return base(vfs)->xSleep(base(vfs), microseconds);
}

static int vfs_time(sqlite3_vfs *vfs, double *now)
{
	return base(vfs)->xCurrentTime(base(vfs), now);
}

static int vfs_time64(sqlite3_vfs *vfs, sqlite3_int64 *now)
{
	return base(vfs)->xCurrentTimeInt64(base(vfs), now);
}

static int vfs_last_error(sqlite3_vfs *vfs, int room, char *text)
{
	(void)vfs;
	if (room > 0)
		snprintf(text, (size_t)room, "%s", braidfs_error());
	return last_errno;
}

static int make_known(const char *name, braidfs_volume *volume, int make_default)
{
	sqlite3_vfs *first = sqlite3_vfs_find(NULL);
	size_t length = strlen(name) + 1;
	if (!first || first->iVersion < 2)
		return SQLITE_ERROR;
	if (sqlite3_vfs_find(name))
		return SQLITE_MISUSE;
	/* locks are those of one VFS: connections by two would write at once */
	for (sqlite3_vfs *other = first; other; other = other->pNext)
		if (other->xOpen == vfs_open && ((volume_vfs *)other)->volume == volume)
			return SQLITE_MISUSE;
	volume_vfs *on = calloc(1, sizeof *on + length);
	if (!on)
		return SQLITE_NOMEM;
	memcpy(on->name, name, length);
	on->volume = volume;
	on->base = first;
	on->vfs = (sqlite3_vfs){
		.iVersion = 2,
		.szOsFile = sizeof(open_file),
		.mxPathname = PATH_ROOM - 256, /* SQLite appends to it */
		.zName = on->name,
		.xOpen = vfs_open,
		.xDelete = vfs_delete,
		.xAccess = vfs_access,
		.xFullPathname = vfs_full_path,
		.xDlOpen = vfs_dlopen,
		.xDlError = vfs_dlerror,
		.xDlSym = vfs_dlsym,
		.xDlClose = vfs_dlclose,
		.xRandomness = vfs_randomness,
		.xSleep = vfs_sleep,
		.xCurrentTime = vfs_time,
		.xGetLastError = vfs_last_error,
		.xCurrentTimeInt64 = vfs_time64,
	};
	int rc = sqlite3_vfs_register(&on->vfs, make_default);
	if (rc)
		free(on);
	return rc;
}

#ifdef SQLITE_CORE

int braidfs_sqlite_register(const char *name, braidfs_volume *volume, int make_default)
{
	int rc = sqlite3_initialize();
	return rc ? rc : make_known(name, volume, make_default);
}

int braidfs_sqlite_unregister(const char *name)
{
	sqlite3_vfs *vfs = sqlite3_vfs_find(name);
	if (!vfs || vfs->xOpen != vfs_open)
		return SQLITE_NOTFOUND;
	if (((volume_vfs *)vfs)->nodes)
		return SQLITE_BUSY;
	int rc = sqlite3_vfs_unregister(vfs);
	if (rc == SQLITE_OK)
		free(vfs);
	return rc;
}

#else

static braidfs_volume *loaded;

/* With databases that are still open it stays as after a crash: what was synced is there. */
static void close_loaded(void)
{
	int r = braidfs_close(loaded);
	if (r)
		fprintf(stderr, "braidfs: the volume was not closed: %s\n", braidfs_error());
}

/* Takes the first name of a list with colons between them. Those of a URI's scheme, and up to the slash after its host,
 * are its own. */
static char *next_device(char **rest)
{
	char *first = *rest, *end;
	if (!first)
		return NULL;
	size_t plain = strcspn(first, ":/");
	end = first + plain;
	if (!strncmp(end, "://", 3))
		end += 3 + strcspn(end + 3, "/");
	end = strchr(end, ':');
	*rest = end ? end + 1 : NULL;
	if (end)
		*end = '\0';
	return first;
}

static int open_loaded(char **error)
{
	const char *devices = getenv("BRAIDFS_VOLUME"), *names[64];
	size_t count = 0;
	if (!devices || !*devices) {
		*error = sqlite3_mprintf("BRAIDFS_VOLUME does not say on which devices the volume lies");
		return SQLITE_ERROR;
	}
	char *list = strdup(devices), *rest = list;
	if (!list)
		return SQLITE_NOMEM;
	for (char *one; count < 64 && (one = next_device(&rest));)
		names[count++] = one;
	int r = rest ? -EINVAL : braidfs_open(names, count, getenv("BRAIDFS_OPTIONS"), &loaded);
	if (r)
		*error = sqlite3_mprintf("%s: %s", devices, rest ? "too many devices" : braidfs_error());
	free(list);
	return r ? SQLITE_CANTOPEN : SQLITE_OK;
}

/* SQLite calls it when a connection loads the extension, which stays for the life of the process. */
__attribute__((visibility("default"))) int sqlite3_braidfsvfs_init(sqlite3 *db, char **error, const sqlite3_api_routines *api)
{
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
	int rc = SQLITE_OK;
	(void)db;
	SQLITE_EXTENSION_INIT2(api);
	pthread_mutex_lock(&once);
	if (!loaded) {
		rc = open_loaded(error);
		if (rc == SQLITE_OK && (rc = make_known("braidfs", loaded, 0)) != SQLITE_OK) {
			braidfs_close(loaded);
			loaded = NULL;
		}
		if (rc == SQLITE_OK)
			atexit(close_loaded);
	}
	pthread_mutex_unlock(&once);
	return rc == SQLITE_OK ? SQLITE_OK_LOAD_PERMANENTLY : rc;
}

#endif
