/* Fuzz against libjpeg-turbo: whatever JPEG the core accepts, libjpeg decodes too, to the same pixels; and scaled to a
 * half, a quarter and an eighth, to the same samples as the core's reduced planes.
 *
 * The input is as in fuzz_jpeg.c: a JPEG file and NUM_PARAMETERS bytes. Mutations know the segments of a JPEG, so that
 * many files stay decodable: blind ones are nearly all refused by both. Needs libjpeg-turbo's headers (Debian:
 * libjpeg62-turbo-dev).
 */
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include "check.h"

#define FEW_PIXELS (1 << 18)
#define MAX_SEGMENTS 64

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);
__attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room); /* libFuzzer's */

static size_t num_compared, num_refused;

static void fail(const char *what) {
  fprintf(stderr, "differs from libjpeg: %s\n", what);
  abort();
}

static void report(void) { printf("%zu compared with libjpeg, %zu refused\n", num_compared, num_refused); }

/* ---- libjpeg ----------------------------------------------------------------------------------------------------- */

typedef struct {
  struct jpeg_error_mgr manager;
  jmp_buf back;
} errors;

static void give_up(j_common_ptr info) { longjmp(((errors *)info->err)->back, 1); }

static void be_quiet(j_common_ptr info, int level) {
  (void)info, (void)level;
}

/* What libjpeg is asked for, and [height, width, channels] of what it must give. */
typedef struct {
  J_COLOR_SPACE space;
  unsigned denominator; /* of the scale */
  int height, width, channels;
} wanted;

/* Decode `file` by libjpeg's islow into `out`. Return whether it does. */
static bool decode_elsewhere(const uint8_t *file, size_t size, wanted want, uint8_t *out) {
  struct jpeg_decompress_struct info = {0};
  errors handler;
  info.err = jpeg_std_error(&handler.manager);
  handler.manager.error_exit = give_up;
  handler.manager.emit_message = be_quiet;
  if (setjmp(handler.back)) {
    jpeg_destroy_decompress(&info);
    return false;
  }
  jpeg_create_decompress(&info);
  jpeg_mem_src(&info, file, (unsigned long)size);
  (void)jpeg_read_header(&info, TRUE);
  info.out_color_space = want.space;
  info.scale_denom = want.denominator;
  info.dct_method = JDCT_ISLOW;
  (void)jpeg_start_decompress(&info);
  if ((int)info.output_width != want.width || (int)info.output_height != want.height) fail("the size");
  if (info.output_components != want.channels) fail("the channels");
  size_t row_bytes = (size_t)want.width * (size_t)want.channels;
  while (info.output_scanline < info.output_height) {
    JSAMPROW row = out + info.output_scanline * row_bytes;
    (void)jpeg_read_scanlines(&info, &row, 1);
  }
  (void)jpeg_finish_decompress(&info);
  jpeg_destroy_decompress(&info);
  return true;
}

static void compare_plane(const pl_plane *plane, wanted want, const uint8_t *theirs) {
  if (plane->width != want.width || plane->height != want.height) fail("the size of a plane");
  for (int y = 0; y < want.height; y++) {
    for (int x = 0; x < want.width; x++) {
      if (plane->data[y * plane->stride + x] != theirs[(y * want.width + x) * want.channels]) fail("a reduced sample");
    }
  }
}

/* Compare all components where none is subsampled, else luma where it is not. */
static void compare_reduced(const uint8_t *file, size_t size, const pl_record *record, int reduction,
                            pl_scratch *scratch, uint8_t *theirs) {
  const bool is_444 = record->components == 3 && record->hmax == 1 && record->vmax == 1;
  if (record->hs[0] != record->hmax || record->vs[0] != record->vmax) return;
  wanted want = {is_444 ? JCS_YCbCr : JCS_GRAYSCALE, (unsigned)reduction, (record->height + reduction - 1) / reduction,
                 (record->width + reduction - 1) / reduction, is_444 ? 3 : 1};
  pl_region whole = {0, 0, record->height, record->width, {reduction, reduction, reduction}};
  pl_plane planes[3];
  if (!decode_elsewhere(file, size, want, theirs)) fail("it refuses to scale a file that the core accepts");
  if (pl_decode_planes(record, whole, PL_ALL, scratch, planes) != PL_OK) fail("the core cannot reduce its record");
  for (int c = 0; c < want.channels; c++) compare_plane(&planes[c], want, theirs + c);
}

static void compare(const uint8_t *file, size_t size, pl_record record) {
  record.orientation = 1; /* libjpeg leaves images as they are stored */
  size_t num_bytes = (size_t)record.width * (size_t)record.height * (size_t)record.components;
  uint8_t *theirs = malloc(num_bytes), *ours = malloc(num_bytes), *reduced = malloc(num_bytes);
  pl_scratch *scratch = pl_scratch_new();
  if (theirs == NULL || ours == NULL || reduced == NULL || scratch == NULL) exit(2);
  wanted want = {record.components == 1 ? JCS_GRAYSCALE : JCS_RGB, 1, record.height, record.width, record.components};
  if (!decode_elsewhere(file, size, want, theirs)) fail("it refuses a file that the core accepts");
  pl_isa ways[] = {pl_isa_best(), PL_SCALAR};
  for (int i = 0; i < 2; i++) {
    pl_isa_choose(ways[i]);
    if (pl_decode_full(&record, record.components, scratch, ours) != PL_OK) fail("the core cannot decode its record");
    if (memcmp(ours, theirs, num_bytes) != 0) fail("the pixels");
    for (int reduction = 2; reduction <= 8; reduction *= 2) {
      compare_reduced(file, size, &record, reduction, scratch, reduced);
    }
  }
  free(reduced);
  pl_scratch_free(scratch);
  free(ours);
  free(theirs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static bool has_begun;
  if (!has_begun) has_begun = atexit(report) == 0;
  if (size < NUM_PARAMETERS) return 0;
  static pl_scratch *scratch;
  if (scratch == NULL || pl_scratch_bytes(scratch) > (64 << 20)) {
    pl_scratch_free(scratch);
    scratch = pl_scratch_new();
  }
  if (scratch == NULL) exit(2);
  pl_indexed indexed;
  size_t file_bytes = size - NUM_PARAMETERS;
  int every = data[size - 1] > 0 ? data[size - 1] : 8;
  if (pl_index_jpeg(data, file_bytes, every, scratch, &indexed) != NULL) {
    num_refused++;
    return 0;
  }
  pl_record record;
  if (pl_record_open(indexed.record, indexed.size, &record) != PL_OK) fail("a record of our own does not open");
  if ((int64_t)record.width * record.height <= FEW_PIXELS) {
    compare(data, file_bytes, record);
    num_compared++;
  }
  return 0;
}

/* ---- mutations --------------------------------------------------------------------------------------------------- */

typedef struct {
  uint8_t *body; /* behind marker and length */
  size_t num_bytes;
  uint8_t marker;
} segment;

static uint64_t state;

static size_t below(size_t limit) { /* xorshift64*, as in driver.c */
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return limit > 0 ? (size_t)((state * 2685821657736338717u >> 33) % limit) : 0;
}

/* Find the segments of a file, also those between scans; return how many. */
static size_t find_segments(uint8_t *file, size_t size, segment found[MAX_SEGMENTS]) {
  size_t num_found = 0, at = 2;
  while (at + 4 <= size && num_found < MAX_SEGMENTS) {
    bool has_length = file[at] == 0xff && file[at + 1] >= 0xc0 && file[at + 1] < 0xff &&
                      !(file[at + 1] >= 0xd0 && file[at + 1] <= 0xd9);
    if (!has_length) {
      at++;
      continue;
    }
    size_t length = (size_t)file[at + 2] << 8 | file[at + 3];
    if (length < 2 || at + 2 + length > size) break;
    if (length > 2) found[num_found++] = (segment){file + at + 4, length - 2, file[at + 1]};
    at += 2 + length;
  }
  return num_found;
}

/* Give the image another size, or a component other factors, another number or other tables. */
static void change_frame(segment frame) {
  static const uint8_t factors[] = {0x11, 0x12, 0x21, 0x22, 0x14, 0x41, 0x44, 0x13, 0x31};
  uint8_t *body = frame.body;
  if (frame.num_bytes < 9) return;
  size_t component = 6 + 3 * below((frame.num_bytes - 6) / 3);
  switch (below(5)) {
    case 0: body[1] = 0, body[2] = (uint8_t)(1 + below(80)); break;
    case 1: body[3] = 0, body[4] = (uint8_t)(1 + below(80)); break;
    case 2: body[component + 1] = factors[below(sizeof factors)]; break;
    case 3: body[component + 2] = (uint8_t)below(4); break;
    default: body[component] = below(2) ? "RGB\1\2\3"[below(6)] : (uint8_t)below(256);
  }
}

/* Give a scan other tables, or of a progressive image other coefficients or bits. */
static void change_scan(segment scan) {
  size_t num_components = scan.body[0];
  if (num_components < 1 || num_components > 3 || scan.num_bytes < 4 + 2 * num_components) return;
  uint8_t *last = scan.body + 1 + 2 * num_components;
  switch (below(4)) {
    case 0: scan.body[2 + 2 * below(num_components)] = (uint8_t)(below(4) << 4 | below(4)); break;
    case 1: last[0] = (uint8_t)below(65); break;
    case 2: last[1] = (uint8_t)below(65); break;
    default: last[2] = (uint8_t)(below(14) << 4 | below(14));
  }
}

static void change_segment(segment one) {
  switch (one.marker) {
    case 0xc0:
    case 0xc1:
    case 0xc2: change_frame(one); break;
    case 0xda: change_scan(one); break;
    case 0xdb: one.body[below(one.num_bytes)] = (uint8_t)(below(2) ? below(256) : 255 * below(2)); break;
    default: one.body[below(one.num_bytes)] = (uint8_t)below(below(2) ? 8 : 256);
  }
}

/* Put a copy of a segment, a restart interval or an Adobe marker before another segment; return the new size. */
static size_t insert_segment(uint8_t *file, size_t size, size_t room, segment before, segment copied) {
  uint8_t restarts[] = {0xff, 0xdd, 0, 4, 0, (uint8_t)below(20)};
  uint8_t adobe[] = {0xff, 0xee, 0, 14, 'A', 'd', 'o', 'b', 'e', 0, 100, 0, 0, 0, 0, (uint8_t)below(3)};
  uint8_t copy[1024];
  const uint8_t *what = copy;
  size_t num_bytes = copied.num_bytes + 4, at = (size_t)(before.body - file) - 4;
  switch (below(3)) {
    case 0: what = restarts, num_bytes = sizeof restarts; break;
    case 1: what = adobe, num_bytes = sizeof adobe; break;
    default:
      if (num_bytes > sizeof copy) return size;
      memcpy(copy, copied.body - 4, num_bytes);
  }
  if (size + num_bytes > room) return size;
  memmove(file + at + num_bytes, file + at, size - at);
  memcpy(file + at, what, num_bytes);
  return size + num_bytes;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed) {
  state = seed * 2862933555777941757u + 3037000493u;
  if (size < 32 + NUM_PARAMETERS || below(4) == 0) return LLVMFuzzerMutate(data, size, room);
  for (size_t times = 1 + below(3); times > 0; times--) {
    segment found[MAX_SEGMENTS];
    size_t num_found = find_segments(data, size - NUM_PARAMETERS, found);
    if (num_found == 0) break;
    segment one = found[below(num_found)], other = found[below(num_found)];
    switch (below(6)) {
      case 0: size = insert_segment(data, size, room, one, other); break;
      case 1: data[size / 2 + below(size / 2)] ^= (uint8_t)(1 << below(8)); break;
      case 2: data[size - 1] = (uint8_t)below(256); break;
      default: change_segment(one);
    }
  }
  return size;
}
