/* Fuzz what makes records: the input is a JPEG file and NUM_PARAMETERS bytes; what is made must open and decode, and an
 * index entry must make the same record of the file again. An entry that was changed must make none, and one whose
 * checksum was made to fit may make any, but never reach beyond its memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../bytes.h"
#include "../entry.h"
#include "../xxh64.h"
#include "check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  abort();
}

static void *copy_of(const void *bytes, size_t size) {
  void *copy = malloc(size);
  if (copy == NULL) exit(2);
  return memcpy(copy, bytes, size);
}

/* Compare with the record that was made without the entry. Its last byte is filled with ones, the file's may not be. */
static void check_entry(const uint8_t *file, size_t size, const uint8_t *entry, size_t entry_bytes,
                        const pl_record *made, pl_scratch *scratch) {
  pl_record record;
  if (!pl_entry_apply(entry, entry_bytes, file, size, scratch, &record)) fail("an entry does not fit its own file");
  if (record.scan_bytes != made->scan_bytes || memcmp(record.bits, made->bits, made->scan_bytes - 1) != 0 ||
      memcmp(entry + PL_ENTRY_BYTES, made->quant - 32, entry_bytes - PL_ENTRY_BYTES) != 0)
    fail("an entry makes another record");
}

static void check_changed(const uint8_t *file, size_t size, uint8_t *entry, size_t entry_bytes, const uint8_t *p,
                          pl_scratch *scratch) {
  pl_record record;
  size_t at = (size_t)pl_little32(p) % entry_bytes;
  entry[at] = (uint8_t)(entry[at] ^ (p[4] | 1));
  if (pl_entry_apply(entry, entry_bytes, file, size, scratch, &record)) fail("a changed entry is believed");
  if (pl_entry_apply(entry, at, file, size, scratch, &record)) fail("an entry that was cut is believed");
  pl_put_little64(entry, pl_xxh64(entry + 8, entry_bytes - 8));
  if (pl_entry_apply(entry, entry_bytes, file, size, scratch, &record)) check_record(&record, p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static pl_scratch *scratch;
  if (size < NUM_PARAMETERS) return 0;
  if (scratch == NULL || pl_scratch_bytes(scratch) > (64 << 20)) {
    pl_scratch_free(scratch);
    scratch = pl_scratch_new();
  }
  if (scratch == NULL) exit(2);
  const uint8_t *parameters = data + size - NUM_PARAMETERS;
  int every = parameters[NUM_PARAMETERS - 1] > 0 ? parameters[NUM_PARAMETERS - 1] : 8;
  pl_indexed indexed;
  if (pl_index_jpeg(data, size - NUM_PARAMETERS, every, scratch, &indexed) != NULL) return 0;
  size_t entry_bytes = pl_entry_write(data, size - NUM_PARAMETERS, &indexed);
  uint8_t *made = copy_of(indexed.record, indexed.size), *entry = NULL;
  if (entry_bytes > 0) entry = copy_of(indexed.record - PL_ENTRY_BYTES, entry_bytes);
  pl_record record;
  if (pl_record_open(made, indexed.size, &record) != PL_OK) fail("a record of our own does not open");
  check_record(&record, parameters);
  if (entry != NULL) {
    check_entry(data, size - NUM_PARAMETERS, entry, entry_bytes, &record, scratch);
    check_changed(data, size - NUM_PARAMETERS, entry, entry_bytes, parameters, scratch);
  }
  free(made);
  free(entry);
  return 0;
}
