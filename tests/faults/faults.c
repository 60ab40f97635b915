/* Faults of the system, switched on and off in a program that runs: preloaded, it reads what to do from the file that
   FAULTS names. "write PREFIX": writes to files below PREFIX fail with EIO; "read PREFIX": reads do; "clock SECONDS":
   the wall clock is so many seconds off. The file may change at any time; without it nothing happens. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int fault(const char *kind, char *rest, size_t size) {
  const char *name = getenv("FAULTS");
  char line[1024];
  size_t length = strlen(kind);
  if (!name) return 0;
  long file = syscall(SYS_openat, AT_FDCWD, name, O_RDONLY);
  if (file < 0) return 0;
  long got = syscall(SYS_read, (int)file, line, sizeof line - 1);
  syscall(SYS_close, (int)file);
  if (got <= (long)length || strncmp(line, kind, length) != 0) return 0;
  line[got] = 0;
  line[strcspn(line, "\n")] = 0;
  snprintf(rest, size, "%s", line + length + 1);
  return 1;
}

static int hits(const char *kind, int file) {
  int before = errno, found = 0;
  char prefix[1024], link[64], path[1024];
  if (fault(kind, prefix, sizeof prefix)) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long length = readlink(link, path, sizeof path - 1);
    if (length > 0) {
      path[length] = 0;
      found = strncmp(path, prefix, strlen(prefix)) == 0;
    }
  }
  errno = found ? EIO : before;
  return found;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void *data, size_t size) {
  return hits("write", file) ? -1 : REAL(write)(file, data, size);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
  return hits("write", file) ? -1 : REAL(pwrite64)(file, data, size, at);
}
int fsync(int file) { return hits("write", file) ? -1 : REAL(fsync)(file); }
ssize_t read(int file, void *data, size_t size) { return hits("read", file) ? -1 : REAL(read)(file, data, size); }
ssize_t pread64(int file, void *data, size_t size, off64_t at) {
  return hits("read", file) ? -1 : REAL(pread64)(file, data, size, at);
}

static long offset(void) {
  char rest[1024];
  int before = errno;
  long seconds = fault("clock", rest, sizeof rest) ? atol(rest) : 0;
  errno = before;
  return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = REAL(clock_gettime)(clock, now);
  if (!code && clock == CLOCK_REALTIME) now->tv_sec += offset();
  return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int code = REAL(gettimeofday)(now, zone);
  if (!code) now->tv_sec += offset();
  return code;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
