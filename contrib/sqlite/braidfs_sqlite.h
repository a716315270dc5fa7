/* SQLite on a braidfs volume in this process: a VFS of SQLite by the C library of braidfs. README.md says how it is used. */
#ifndef BRAIDFS_SQLITE_H
#define BRAIDFS_SQLITE_H

#include <braidfs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the volume known to SQLite as the VFS `name`, for databases by `file:/path?vfs=NAME` or sqlite3_open_v2. An SQLite
 * error code; SQLITE_MISUSE where SQLite knows the name, or the volume, already: connections by two names would not see
 * each other's locks. The volume stays the caller's, who closes it after braidfs_sqlite_unregister. */
int braidfs_sqlite_register(const char *name, braidfs_volume *volume, int make_default);

/* Takes it away: after all databases on it were closed. */
int braidfs_sqlite_unregister(const char *name);

#ifdef __cplusplus
}
#endif

#endif
