/* Reads one tag of an EXIF block, exactly as `paceline.data.decode._orientation` does. */
#include <string.h>

#include "bytes.h"
#include "jpeg.h"

#define TAG_ORIENTATION 0x0112
#define KIND_LONG 4
#define ENTRY_BYTES 12

typedef struct {
  const uint8_t *bytes;
  size_t size;
  bool is_little, is_cut; /* is_cut: something lay beyond the end */
} tiff;

static uint32_t read16(tiff *block, uint64_t at) {
  if (at + 2 > block->size) {
    block->is_cut = true;
    return 0;
  }
  return block->is_little ? pl_little16(block->bytes + at) : pl_big16(block->bytes + at);
}

static uint32_t read32(tiff *block, uint64_t at) {
  if (at + 4 > block->size) {
    block->is_cut = true;
    return 0;
  }
  return block->is_little ? pl_little32(block->bytes + at) : pl_big32(block->bytes + at);
}

/* Return the value of the first entry that is the orientation, or 0. */
static uint32_t find_orientation(tiff *block) {
  uint64_t start = read32(block, 4);
  uint32_t num_entries = read16(block, start);
  for (uint32_t i = 0; i < num_entries && !block->is_cut; i++) {
    uint64_t entry = start + 2 + (uint64_t)i * ENTRY_BYTES;
    uint32_t tag = read16(block, entry), kind = read16(block, entry + 2);
    if (tag != TAG_ORIENTATION || block->is_cut) continue;
    return kind == KIND_LONG ? read32(block, entry + 8) : read16(block, entry + 8);
  }
  return 0;
}

int pl_exif_orientation(const uint8_t *exif, size_t size) {
  if (size >= 6 && memcmp(exif, "Exif\0\0", 6) == 0) {
    exif += 6;
    size -= 6;
  }
  if (size < 2) return 1;
  tiff block = {.bytes = exif, .size = size, .is_little = exif[0] == 'I'};
  if (memcmp(exif, "II", 2) != 0 && memcmp(exif, "MM", 2) != 0) return 1;
  uint32_t orientation = find_orientation(&block);
  return block.is_cut || orientation < 1 || orientation > 8 ? 1 : (int)orientation;
}
