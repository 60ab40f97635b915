/* Bytes that others may hold: mapped memory whose file may be cut, parts of files, and both read ahead of their use. */
#ifndef PACELINE_READING_H
#define PACELINE_READING_H

#include <stdbool.h>

#include "paceline.h"

#define PL_MAX_FILE_BYTES ((uint64_t)1 << 30)

/* Return whether memory can be read: where a file was cut below its mapping, touching it would end the process. Kernels
 * before 5.14 do not say, and are believed. Costs 2 to 5 us for 25 to 110 kB (measured). */
bool pl_is_readable(const void *bytes, size_t num_bytes);

/* Ask the kernel to read what lies under memory. A hint: no error is worth a word. */
void pl_read_ahead(const void *bytes, size_t num_bytes);

/* Ask the kernel to read a part of a file. */
void pl_read_file_ahead(const char *path, uint64_t offset, uint64_t num_bytes);

/* Read `num_bytes` bytes from `offset` on of the file at `path` into `buffer`: all of it where both are 0. Of these
 * only the first `most` are read: `*size`; `*part_bytes` is how many there are. Return PL_UNREADABLE for what is no
 * regular file, ends earlier, or is empty; PL_NOT_INDEXABLE for more than PL_MAX_FILE_BYTES. */
pl_status pl_read_part(const char *path, uint64_t offset, uint64_t num_bytes, size_t most, pl_buffer *buffer,
                       size_t *size, size_t *part_bytes);

#endif
