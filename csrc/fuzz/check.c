/* Decodes a record every way there is; each function ends the program where two of them differ. */
#include "check.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FEW_PIXELS (1 << 20) /* more are not decoded whole: a fuzzer lives of many small inputs */

typedef struct {
  pl_scratch *scratch;
  pl_isa isa;
  uint8_t fill;
} way;

static void expect(bool is_so, const char *what) {
  if (is_so) return;
  fprintf(stderr, "differs: %s\n", what);
  abort();
}

static uint8_t *filled(size_t size, uint8_t fill) {
  uint8_t *memory = malloc(size);
  expect(memory != NULL, "memory");
  memset(memory, fill, size);
  return memory;
}

/* Return a number that changes with any sample of the planes. */
static uint64_t digest(const pl_plane *planes, int components) {
  uint64_t sum = 1469598103934665603u; /* FNV-1a, 64 bits */
  for (int c = 0; c < components; c++)
    for (int y = 0; y < planes[c].height; y++)
      for (int x = 0; x < planes[c].width; x++) sum = (sum ^ planes[c].data[y * planes[c].stride + x]) * 1099511628211u;
  return sum;
}

/* ---- planes ---------------------------------------------------------------------------------------------------- */

static void check_planes(const pl_record *record, const uint8_t *p, const way ways[2]) {
  int top = record->height * p[0] / 256, left = record->width * p[1] / 256;
  int bottom = top + 1 + (record->height - top - 1) * p[2] / 255;
  int right = left + 1 + (record->width - left - 1) * p[3] / 255;
  if ((int64_t)(bottom - top) * (right - left) > FEW_PIXELS) bottom = top + 1, right = left + 1;
  pl_region region = {top, left, bottom, right, {1 << (p[13] & 3), 1 << (p[13] >> 2 & 3), 1 << (p[13] >> 4 & 3)}};
  pl_status status[2];
  uint64_t digests[2] = {0, 0};
  for (int i = 0; i < 2; i++) {
    pl_plane planes[3];
    pl_isa_choose(ways[i].isa);
    status[i] = pl_decode_planes(record, region, PL_ALL, ways[i].scratch, planes);
    if (status[i] == PL_OK) digests[i] = digest(planes, record->components);
  }
  expect(status[0] == status[1], "the status of planes");
  expect(digests[0] == digests[1], "the samples of planes");
}

/* ---- crops ----------------------------------------------------------------------------------------------------- */

static double odd_number(uint8_t kind, double usual) {
  switch (kind) {
    case 0: return NAN;
    case 1: return INFINITY;
    case 2: return -usual - 1;
    case 3: return 1e300;
    case 4: return 0;
    case 5: return 1e-300;
    case 6: return usual + 1e9;
    default: return usual;
  }
}

static pl_box box_of(const pl_record *record, const uint8_t *p) {
  bool is_lying = record->orientation >= 5;
  double height = is_lying ? record->width : record->height, width = is_lying ? record->height : record->width;
  pl_box box = {.top = height * p[0] / 256, .left = width * p[1] / 256};
  box.height = (height - box.top) * (p[2] + 1) / 256;
  box.width = (width - box.left) * (p[3] + 1) / 256;
  if (p[4] & 1) box = (pl_box){floor(box.top), floor(box.left), ceil(box.height), ceil(box.width)};
  while (box.height * box.width > FEW_PIXELS) box.height /= 2, box.width /= 2;
  switch (p[4] >> 5) { /* one in eight for each: a number that no box can have, or hardly */
    case 0: box.top = odd_number(p[5] & 15, box.top); break;
    case 1: box.left = odd_number(p[5] & 15, box.left); break;
    case 2: box.height = odd_number(p[5] & 15, box.height); break;
    case 3: box.width = odd_number(p[5] & 15, box.width); break;
    default: break;
  }
  return box;
}

static void check_crop(const pl_record *record, const uint8_t *p, const way ways[2]) {
  pl_box box = box_of(record, p);
  int size = (p[6] & 7) == 0 ? 1 + p[7] : 1 + p[7] % 48, channels = p[6] & 8 ? 1 : 3;
  pl_stage stage = (p[6] >> 6) == 3 ? (pl_stage)(p[7] % 4) : PL_ALL;
  size_t out_bytes = (size_t)channels * (size_t)size * (size_t)size;
  pl_status status[2];
  uint8_t *out[2];
  for (int i = 0; i < 2; i++) {
    out[i] = filled(out_bytes, ways[i].fill);
    pl_isa_choose(ways[i].isa);
    status[i] = pl_decode_crop(record, box, p[6] >> 4 & 1, p[6] >> 5 & 1, size, channels, stage, ways[i].scratch,
                               out[i]);
  }
  expect(status[0] == status[1], "the status of a crop");
  bool is_made = status[0] == PL_OK && (stage == PL_ALL || stage == PL_NO_REDUCTION);
  if (is_made) expect(memcmp(out[0], out[1], out_bytes) == 0, "the pixels of a crop");
  free(out[0]);
  free(out[1]);
}

/* ---- whole images ---------------------------------------------------------------------------------------------- */

static void check_full(const pl_record *record, int channels, const way ways[2]) {
  if ((int64_t)record->height * record->width > FEW_PIXELS) return;
  size_t out_bytes = (size_t)record->height * (size_t)record->width * (size_t)channels;
  pl_status status[2];
  uint8_t *out[2];
  for (int i = 0; i < 2; i++) {
    out[i] = filled(out_bytes, ways[i].fill);
    pl_isa_choose(ways[i].isa);
    status[i] = pl_decode_full(record, channels, ways[i].scratch, out[i]);
  }
  expect(status[0] == status[1], "the status of a whole image");
  if (status[0] == PL_OK) expect(memcmp(out[0], out[1], out_bytes) == 0, "the pixels of a whole image");
  free(out[0]);
  free(out[1]);
}

void check_record(const pl_record *record, const uint8_t p[NUM_PARAMETERS]) {
  static pl_scratch *used; /* by one input after the other */
  if (used == NULL || pl_scratch_bytes(used) > (64 << 20)) {
    if (used != NULL) pl_scratch_free(used);
    used = pl_scratch_new();
  }
  way ways[2] = {{used, pl_isa_best(), 0}, {pl_scratch_new(), PL_SCALAR, 255}};
  expect(ways[0].scratch != NULL && ways[1].scratch != NULL, "memory");
  check_planes(record, p, ways);
  check_crop(record, p + 4, ways);
  check_full(record, p[12] & 1 ? 1 : 3, ways);
  pl_scratch_free(ways[1].scratch);
}
