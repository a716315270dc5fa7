/* Children of a process that has volumes open use volumes of their own: what waits in the parent has no part in it. */
#include <braidfs.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { VOLUMES = 3, CHILDREN = 400 };

static int child(void)
{
	/* who waits for ever ends by a signal */
	alarm(20);
	braidfs_volume *own;
	return braidfs_open_memory(16 << 20, NULL, &own) || braidfs_mkdir(own, "d", 0700) || braidfs_sync(own) ||
		braidfs_close(own);
}

int main(void)
{
	braidfs_volume *volumes[VOLUMES];
	/* the more threads wait, the more places there are to wait at: what goes wrong with few of them need not with many */
	for (int n = 0; n < VOLUMES; n++) {
		if (braidfs_open_memory(16 << 20, NULL, &volumes[n]))
			return 2;
		for (int i = 0; i < CHILDREN; i++) {
			pid_t pid = fork();
			if (pid == 0)
				_exit(child());
			int status = -1;
			if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) {
				fprintf(stderr, "child %d with %d volumes: wait status %#x\n", i, n + 1, (unsigned)status);
				return 1;
			}
		}
	}
	for (int n = 0; n < VOLUMES; n++)
		if (braidfs_close(volumes[n]))
			return 3;
	return 0;
}
