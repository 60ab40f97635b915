/* Asks the kernel for memory and for files, and never waits for a writer that is not there. */
#define _GNU_SOURCE /* MADV_POPULATE_READ, O_CLOEXEC */
#include "reading.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_AHEAD_BYTES ((uint64_t)8 << 20) /* of a file: the kernel reads all that it is asked for, at once */

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* Return what madvise does to the pages under memory. */
static int advise(const void *bytes, size_t num_bytes, int advice) {
  uintptr_t first = (uintptr_t)bytes, page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = first & ~(page - 1);
  return madvise((void *)begin, first + num_bytes - begin, advice);
}

bool pl_is_readable(const void *bytes, size_t num_bytes) {
#ifdef MADV_POPULATE_READ
  return advise(bytes, num_bytes, MADV_POPULATE_READ) == 0 || (errno != EFAULT && errno != EHWPOISON);
#else
  (void)bytes, (void)num_bytes;
  return true;
#endif
}

void pl_read_ahead(const void *bytes, size_t num_bytes) { (void)advise(bytes, num_bytes, MADV_WILLNEED); }

/* ---- files ----------------------------------------------------------------------------------------------------- */

/* Open a file to be read. A pipe without a writer is opened at once, and found to be no file. */
static int open_file(const char *path) {
  int descriptor;
  do descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

void pl_read_file_ahead(const char *path, uint64_t offset, uint64_t num_bytes) {
  if (num_bytes == 0 || num_bytes > MAX_AHEAD_BYTES) num_bytes = MAX_AHEAD_BYTES;
  int descriptor = open_file(path);
  if (descriptor < 0) return;
  (void)posix_fadvise(descriptor, (off_t)offset, (off_t)num_bytes, POSIX_FADV_WILLNEED);
  (void)close(descriptor);
}

/* Find how many bytes the part of an open file has. */
static pl_status find_extent(int descriptor, uint64_t offset, uint64_t num_bytes, size_t *part_bytes) {
  struct stat found;
  if (fstat(descriptor, &found) || !S_ISREG(found.st_mode) || found.st_size <= 0) return PL_UNREADABLE;
  uint64_t file_bytes = (uint64_t)found.st_size;
  if (offset == 0 && num_bytes == 0) num_bytes = file_bytes;
  if (num_bytes == 0 || num_bytes > file_bytes || offset > file_bytes - num_bytes) return PL_UNREADABLE;
  *part_bytes = (size_t)num_bytes;
  return num_bytes > PL_MAX_FILE_BYTES ? PL_NOT_INDEXABLE : PL_OK;
}

static pl_status read_all(int descriptor, uint64_t offset, size_t size, uint8_t *out) {
  for (size_t at = 0; at < size;) {
    ssize_t got = pread(descriptor, out + at, size - at, (off_t)(offset + at));
    if (got == 0 || (got < 0 && errno != EINTR)) return PL_UNREADABLE;
    at += got > 0 ? (size_t)got : 0;
  }
  return PL_OK;
}

pl_status pl_read_part(const char *path, uint64_t offset, uint64_t num_bytes, size_t most, pl_buffer *buffer,
                       size_t *size, size_t *part_bytes) {
  int descriptor = open_file(path);
  if (descriptor < 0) return PL_UNREADABLE;
  pl_status status = find_extent(descriptor, offset, num_bytes, part_bytes);
  if (status == PL_OK) {
    *size = *part_bytes < most ? *part_bytes : most;
    uint8_t *out = pl_reserve(buffer, *size);
    status = out != NULL ? read_all(descriptor, offset, *size, out) : PL_NO_MEMORY;
  }
  (void)close(descriptor);
  return status;
}
