/* Files mapped into memory, which may be cut short while they are in use.
 *
 * Whoever touches a mapped page that its file no longer has, or that cannot be read, gets SIGBUS. Here a handler puts
 * zeros in its place, up to the end of the mapping, and notes the file: the thread goes on, and whoever uses what it
 * made asks `pl_mapping_cut` first. Other faults are left to the handler that was there before.
 */
#ifndef PACELINE_MAPPED_H
#define PACELINE_MAPPED_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

typedef struct pl_mapping pl_mapping;

/* Map `num_bytes` bytes from `offset` on, a multiple of the page size. With `is_private` they may be written to, which
 * changes no file. `name` is what `pl_mapping_cut` calls the file. Return NULL with errno set where that cannot be.
 * No two threads may call these functions at once. */
pl_mapping *pl_mapping_new(int descriptor, size_t num_bytes, off_t offset, bool is_private, const char *name);

/* Return the bytes of a mapping. */
void *pl_mapping_bytes(const pl_mapping *mapping);

/* Unmap it. */
void pl_mapping_free(pl_mapping *mapping);

/* Return the name of the first file that was found cut short, of those that are mapped; NULL where none was. It stands
 * until `pl_mapping_free`. */
const char *pl_mapping_cut(void);

#endif
