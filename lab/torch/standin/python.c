// A Python program in a fork of a process that has imported torch (forks.py), started as by the interpreter: with these arguments,
// this environment and folder, and the same descriptors. Signals go on to it, and this process ends as it does.
//
// The request is, after three numbers (bytes of all, arguments, descriptors): the descriptors' numbers, then strings with their ends, of
// which the first is the folder and those after the arguments are the environment. The answers are the program's pid and its status.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { MOST = 250 }; // descriptors of a message

static volatile int32_t program;

static void forward(int number) {
	if (kill(program, number) != 0)
		_exit(126);
}

static void fail(const char *what) {
	perror(what);
	exit(127);
}

// A socket with an abstract name, without its first byte, in STANDIN_FORKS.
static int connected(void) {
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	const char *name = getenv("STANDIN_FORKS");
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (name == NULL || strlen(name) + 1 > sizeof to.sun_path)
		fail("STANDIN_FORKS");
	memcpy(to.sun_path + 1, name, strlen(name));
	if (s < 0 || connect(s, (struct sockaddr *)&to, offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name)) != 0)
		fail("STANDIN_FORKS");
	return s;
}

static int open_descriptors(int but, int32_t *found) {
	DIR *d = opendir("/proc/self/fd");
	int n = 0;
	if (d == NULL)
		fail("/proc/self/fd");
	for (struct dirent *e; (e = readdir(d)) != NULL;) {
		int fd = atoi(e->d_name);
		if (e->d_name[0] == '.' || fd == but || fd == dirfd(d))
			continue;
		if (n == MOST)
			fail("too many descriptors");
		found[n++] = fd;
	}
	closedir(d);
	return n;
}

static void ask(int s, int argc, char **argv, const int32_t *fds, int n) {
	char *text, *folder = getcwd(NULL, 0), rights[CMSG_SPACE(sizeof(int) * MOST)] = {0};
	size_t size;
	FILE *f = open_memstream(&text, &size);
	uint32_t head[3] = {0, argc - 1, n};
	fwrite(head, sizeof head, 1, f);
	fwrite(fds, sizeof *fds, n, f);
	fwrite(folder, strlen(folder) + 1, 1, f);
	for (int i = 1; i < argc; i++)
		fwrite(argv[i], strlen(argv[i]) + 1, 1, f);
	for (char **e = environ; *e != NULL; e++)
		fwrite(*e, strlen(*e) + 1, 1, f);
	fclose(f);
	((uint32_t *)text)[0] = size;
	struct iovec io = {text, size};
	struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = n > 0 ? rights : NULL, .msg_controllen = n > 0 ? CMSG_SPACE(sizeof(int) * n) : 0};
	if (n > 0) {
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		*c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int) * n), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
		memcpy(CMSG_DATA(c), fds, sizeof(int) * n);
	}
	for (ssize_t sent; size > 0; size -= sent, io.iov_base = text += sent, io.iov_len = size, m.msg_control = NULL, m.msg_controllen = 0)
		if ((sent = sendmsg(s, &m, MSG_NOSIGNAL)) < 0)
			fail("sendmsg");
}

static int32_t answer(int s) {
	int32_t value;
	if (recv(s, &value, sizeof value, MSG_WAITALL) != sizeof value)
		_exit(127); // the process that forks has ended
	return value;
}

int main(int argc, char **argv) {
	int32_t fds[MOST];
	sigset_t all, before;
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, &before); // until it is known where they go to
	int s = connected(), n = open_descriptors(s, fds);
	ask(s, argc, argv, fds, n);
	program = answer(s);
	for (int i = 0; i < n; i++)
		close(fds[i]); // a pipe's other end sees when the program closes it
	struct sigaction a = {.sa_handler = forward, .sa_flags = SA_RESTART};
	for (int i = 1; i < SIGSYS; i++)
		if (i != SIGCHLD && i != SIGPIPE)
			sigaction(i, &a, NULL);
	sigprocmask(SIG_SETMASK, &before, NULL);
	int status = answer(s);
	if (WIFSIGNALED(status)) {
		setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
		signal(WTERMSIG(status), SIG_DFL);
		raise(WTERMSIG(status));
	}
	return WEXITSTATUS(status);
}
