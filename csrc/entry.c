/* Writes index entries, and puts a record together from an entry and its file. */
#include "entry.h"

#include <string.h>

#include "bytes.h"
#include "jpeg.h"
#include "record.h"
#include "xxh64.h"

/* Offsets in an entry. */
enum { CHECKSUM = 0, DIGEST = 8, FILE_BYTES = 16, SCAN_AT = 24, SCAN_BYTES = 28 };

size_t pl_entry_write(const uint8_t *file, size_t size, const pl_indexed *indexed) {
  uint8_t *entry = indexed->record - PL_ENTRY_BYTES;
  size_t entry_bytes = PL_ENTRY_BYTES + indexed->head_bytes;
  if (indexed->scan_bytes == 0 || size > UINT32_MAX) return 0;
  pl_put_little64(entry + DIGEST, pl_xxh64(file, size));
  pl_put_little64(entry + FILE_BYTES, size);
  pl_put_little32(entry + SCAN_AT, (uint32_t)indexed->scan_at);
  pl_put_little32(entry + SCAN_BYTES, (uint32_t)indexed->scan_bytes);
  pl_put_little64(entry + CHECKSUM, pl_xxh64(entry + DIGEST, entry_bytes - DIGEST));
  return entry_bytes;
}

static bool is_of(const uint8_t *entry, size_t entry_bytes, const uint8_t *file, size_t size) {
  return pl_little64(entry + CHECKSUM) == pl_xxh64(entry + DIGEST, entry_bytes - DIGEST) &&
         pl_little64(entry + FILE_BYTES) == size && pl_little64(entry + DIGEST) == pl_xxh64(file, size);
}

bool pl_entry_apply(const uint8_t *entry, size_t entry_bytes, const uint8_t *file, size_t size, pl_scratch *scratch,
                    pl_record *record) {
  if (entry_bytes < PL_ENTRY_BYTES + PL_HEADER_BYTES || entry_bytes > UINT32_MAX || size > UINT32_MAX) return false;
  uint8_t *copy = pl_reserve(&scratch->record, entry_bytes + size + PL_TAIL_BYTES);
  if (copy == NULL) return false;
  memcpy(copy, entry, entry_bytes); /* first: an entry in a mapped file may change once it was checked */
  if (!is_of(copy, entry_bytes, file, size)) return false;
  size_t scan_at = pl_little32(copy + SCAN_AT), scan_bytes = pl_little32(copy + SCAN_BYTES), taken = 0;
  if (scan_at > size || scan_bytes > size - scan_at) return false;
  size_t num_bytes = pl_unstuff(file + scan_at, scan_bytes, copy + entry_bytes, &taken);
  memset(copy + entry_bytes + num_bytes, 0, PL_TAIL_BYTES);
  return pl_record_open(copy + PL_ENTRY_BYTES, entry_bytes - PL_ENTRY_BYTES + num_bytes + PL_TAIL_BYTES, record) ==
         PL_OK;
}
