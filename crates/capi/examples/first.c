/* A volume in an image file, from C: make it, write a file that survives a crash, list, close.
 *
 *     cc first.c $(pkg-config --cflags --libs braidfs) -o first && ./first vol.img
 */
#include <braidfs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program where a call failed. */
static int64_t ok(int64_t result)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s\n", strerror((int)-result), braidfs_error());
		exit(1);
	}
	return result;
}

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "usage: first IMAGE (a new one)\n");
		return 2;
	}
	const char *image = argv[1];
	braidfs_volume *volume;
	ok(braidfs_format(image, 64 << 20, "label=first"));
	ok(braidfs_open(&image, 1, "noatime", &volume));

	ok(braidfs_mkdir_all(volume, "mail/2026"));
	/* a new version under another name, synced, then renamed: after a crash there is the old one or the new one */
	braidfs_file *file;
	ok(braidfs_file_open(volume, "mail/2026/1.new", BRAIDFS_O_RDWR | BRAIDFS_O_CREAT | BRAIDFS_O_TRUNC, 0644, &file));
	const char text[] = "hello\n";
	if (ok(braidfs_write(file, text, strlen(text))) != (int64_t)strlen(text)) {
		fprintf(stderr, "no space\n");
		return 1;
	}
	ok(braidfs_fsync(file, 0));
	ok(braidfs_rename(volume, "mail/2026/1.new", "mail/2026/1", 0));
	ok(braidfs_fsync(file, 0)); /* its new name, too */

	char back[64];
	int64_t n = ok(braidfs_pread(file, back, sizeof back, 0));
	printf("read: %.*s", (int)n, back);
	ok(braidfs_file_close(file));

	braidfs_dir *dir;
	struct braidfs_dirent entry;
	ok(braidfs_opendir(volume, "mail/2026", &dir));
	while (ok(braidfs_readdir(dir, &entry)))
		printf("entry: %s, inode %llu\n", entry.name, (unsigned long long)entry.ino);
	ok(braidfs_closedir(dir));
	ok(braidfs_close(volume));
	return 0;
}
