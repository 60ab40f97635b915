/* JPEG files as they lie, on a disk or in memory: their sizes, and crops of them by way of a record. */
#ifndef PACELINE_FILES_H
#define PACELINE_FILES_H

#include "paceline.h"

#define PL_FILE_EVERY 8 /* MCUs between seek points, as packs have them by default */

/* Where an image's bytes lie, and those of its index entry. */
typedef struct {
  const char *path;     /* NULL: in memory */
  const uint8_t *bytes; /* or NULL: there is no image */
  uint64_t offset, num_bytes; /* of a part of the file at `path`; both 0: of the whole */
  const uint8_t *entry;
  size_t entry_bytes; /* 0: none */
} pl_file;

/* What all crops of a batch have in common; as in `pl_decode_crop`. */
typedef struct {
  int inside, size, channels;
  pl_stage stage;
} pl_crop;

/* An index entry from malloc; NULL: none. */
typedef struct {
  uint8_t *bytes;
  size_t size;
} pl_entry;

/* Set `size` to height and width of the upright image, or to zeros where the status is not PL_OK: PL_UNREADABLE, or
 * PL_NOT_INDEXABLE where the header says it already. */
pl_status pl_measure_file(const pl_file *file, pl_scratch *scratch, int32_t size[2]);

/* Decode and resize a box of a JPEG file, as of its record. Where the image is not of height and width `size`, set it,
 * and return PL_RESIZED. `*made` gets an entry of the file if it had no valid one and can have one. */
pl_status pl_crop_file(const pl_file *file, pl_box box, int flip, const pl_crop *crop, int32_t size[2],
                       pl_scratch *scratch, uint8_t *out, pl_entry *made);

#endif
