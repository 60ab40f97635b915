/* Index entries: what must be known of a JPEG file to make its record without walking through its bits again
 * (docs/reference/indexed-jpeg.md). One is believed of no other bytes than those it was made from. */
#ifndef PACELINE_ENTRY_H
#define PACELINE_ENTRY_H

#include <stdbool.h>

#include "paceline.h"

/* Write the entry of a file that was just indexed: it begins PL_ENTRY_BYTES before the record, and ends with its head.
 * Return its size, or 0 where the file has none, as its bits were coded anew. */
size_t pl_entry_write(const uint8_t *file, size_t size, const pl_indexed *indexed);

/* Make the record of `file` in the scratch by an entry. Return false where the entry is damaged, or another file's. */
bool pl_entry_apply(const uint8_t *entry, size_t entry_bytes, const uint8_t *file, size_t size, pl_scratch *scratch,
                    pl_record *record);

#endif
