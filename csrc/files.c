/* Reads a file into the scratch, makes its record, by its index entry if that is valid, and decodes the crop. */
#include "files.h"

#include <stdlib.h>
#include <string.h>

#include "entry.h"
#include "jpeg.h"
#include "reading.h"

#define HEADER_BYTES ((size_t)16 << 10) /* read at first to find an image's size; 16 times more if that is too little */

/* Read the first `most` bytes of a file into the scratch. Memory is copied too: it may change once it was checked. */
static pl_status load(const pl_file *file, size_t most, pl_scratch *scratch, size_t *size, size_t *file_bytes) {
  if (file->path != NULL) {
    return pl_read_part(file->path, file->offset, file->num_bytes, most, &scratch->file, size, file_bytes);
  }
  if (file->num_bytes == 0) return PL_UNREADABLE;
  if (file->num_bytes > PL_MAX_FILE_BYTES) return PL_NOT_INDEXABLE;
  *file_bytes = (size_t)file->num_bytes;
  *size = *file_bytes < most ? *file_bytes : most;
  if (!pl_is_readable(file->bytes, *size)) return PL_UNREADABLE;
  uint8_t *copy = pl_reserve(&scratch->file, *size);
  if (copy == NULL) return PL_NO_MEMORY;
  memcpy(copy, file->bytes, *size);
  return PL_OK;
}

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

/* Set `size` to that of the upright image; EXIF's 5 to 8 turn it by a quarter. Return whether it was so before. */
static bool set_size(int width, int height, int orientation, int32_t size[2]) {
  int32_t upright[2] = {orientation >= 5 ? width : height, orientation >= 5 ? height : width};
  bool is_same = size[0] == upright[0] && size[1] == upright[1];
  memcpy(size, upright, sizeof upright);
  return is_same;
}

pl_status pl_measure_file(const pl_file *file, pl_scratch *scratch, int32_t size[2]) {
  size[0] = size[1] = 0;
  for (size_t most = HEADER_BYTES;; most *= 16) {
    size_t num_bytes = 0, file_bytes = 0;
    pl_status status = load(file, most, scratch, &num_bytes, &file_bytes);
    if (status != PL_OK) return status;
    pl_jpeg jpeg;
    pl_scan scan;
    const char *reason = pl_jpeg_open(scratch->file.data, num_bytes, &jpeg, &scan);
    if (reason == NULL) {
      (void)set_size(jpeg.width, jpeg.height, jpeg.orientation, size);
      return PL_OK;
    }
    if (reason != pl_cut_off || num_bytes == file_bytes) return PL_NOT_INDEXABLE;
  }
}

/* ---- crops ------------------------------------------------------------------------------------------------------- */

static pl_status decode(const pl_record *record, pl_box box, int flip, const pl_crop *crop, int32_t size[2],
                        pl_scratch *scratch, uint8_t *out) {
  if (!set_size(record->width, record->height, record->orientation, size)) return PL_RESIZED;
  return pl_decode_crop(record, box, crop->inside, flip, crop->size, crop->channels, crop->stage, scratch, out);
}

/* Return whether a record is at fault, and not who asked for it. */
static bool is_damaged(pl_status status) {
  return status == PL_BAD_TABLES || status == PL_BAD_POINTS || status == PL_BAD_BITS;
}

static void hand_out_entry(const uint8_t *file, size_t size, const pl_indexed *indexed, pl_entry *made) {
  size_t entry_bytes = pl_entry_write(file, size, indexed);
  if (entry_bytes > 0) made->bytes = malloc(entry_bytes);
  if (made->bytes == NULL) return; /* without one the file is indexed again */
  memcpy(made->bytes, indexed->record - PL_ENTRY_BYTES, entry_bytes);
  made->size = entry_bytes;
}

pl_status pl_crop_file(const pl_file *file, pl_box box, int flip, const pl_crop *crop, int32_t size[2],
                       pl_scratch *scratch, uint8_t *out, pl_entry *made) {
  size_t num_bytes = 0, file_bytes = 0;
  pl_record record;
  pl_status status = load(file, SIZE_MAX, scratch, &num_bytes, &file_bytes);
  if (status != PL_OK) return status;
  const uint8_t *bytes = scratch->file.data;
  if (file->entry_bytes > 0 && pl_is_readable(file->entry, file->entry_bytes) &&
      pl_entry_apply(file->entry, file->entry_bytes, bytes, num_bytes, scratch, &record)) {
    status = decode(&record, box, flip, crop, size, scratch, out);
    if (!is_damaged(status)) return status;
  }
  pl_indexed indexed;
  if (pl_index_jpeg(bytes, num_bytes, PL_FILE_EVERY, scratch, &indexed) != NULL) return PL_NOT_INDEXABLE;
  status = pl_record_open(indexed.record, indexed.size, &record);
  if (status == PL_OK) status = decode(&record, box, flip, crop, size, scratch, out);
  if (status == PL_OK) hand_out_entry(bytes, num_bytes, &indexed, made);
  return status;
}
