/* Decodes a region of a record into planes of samples: seek, read two rows of MCUs side by side, transform. */
#include <string.h>

#include "bytes.h"
#include "entropy.h"
#include "idct.h"
#include "paceline.h"

#define ROW_SLACK 64   /* bytes that may be read beyond a row's end (pl_plane) */
#define PLANE_SLACK 8  /* rows that may be read beyond the last */
#define PAGE 4096      /* rows this far apart compete for the same lines of a cache */

/* A region in MCUs, and how it is decoded. */
typedef struct {
  const pl_record *record;
  pl_idct *idct[3];
  int side[3]; /* of a decoded block, in samples */
  pl_mcu mcu;
  int first_x, first_y, across, down;
  int16_t *coefficients; /* of a run of MCUs of two rows */
  uint8_t *planes[3];
  ptrdiff_t strides[3];
  int16_t quant[3][64] __attribute__((aligned(64)));
} region;

/* ---- where things are ------------------------------------------------------------------------------------------- */

/* Return the transform of blocks to `side` x `side` samples. */
static pl_idct *choose_idct(int side) {
  if (side == 1) return pl_idct_to_1;
#if defined(__x86_64__)
  if (pl_isa_now() == PL_AVX2) return side == 8 ? pl_idct_avx2 : side == 4 ? pl_idct_to_4_avx2 : pl_idct_to_2_avx2;
#endif
  return side == 8 ? pl_idct_scalar : side == 4 ? pl_idct_to_4_scalar : pl_idct_to_2_scalar;
}

static int up(int value, int unit) { return (value + unit - 1) / unit; }

static int least(int a, int b) { return a < b ? a : b; }

static bool set_extent(region *r, pl_region pixels) {
  const pl_record *record = r->record;
  if (pixels.top < 0 || pixels.left < 0 || pixels.top >= pixels.bottom || pixels.left >= pixels.right) return false;
  if (pixels.bottom > record->height || pixels.right > record->width) return false;
  int width = 8 * record->hmax, height = 8 * record->vmax;
  r->first_x = pixels.left / width;
  r->first_y = pixels.top / height;
  r->across = up(pixels.right, width) - r->first_x;
  r->down = up(pixels.bottom, height) - r->first_y;
  for (int c = 0; c < record->components; c++) {
    r->side[c] = 8 / pixels.reductions[c];
    r->idct[c] = choose_idct(r->side[c]);
  }
  return true;
}

static void read_quantisation(region *r) {
  for (int c = 0; c < r->record->components; c++) {
    for (int i = 0; i < 64; i++) r->quant[c][i] = (int16_t)(uint16_t)pl_little16(r->record->quant + 128 * c + 2 * i);
  }
}

static bool reserve_memory(region *r, pl_scratch *scratch, pl_plane planes[3]) {
  const pl_record *record = r->record;
  size_t offsets[3], size = 0;
  for (int c = 0; c < record->components; c++) {
    int h = record->hs[c], v = record->vs[c], side = r->side[c], reduction = 8 / side;
    size_t stride = (size_t)up(r->across * side * h + ROW_SLACK, 64) * 64;
    if (stride % PAGE == 0) stride += 64;
    offsets[c] = size;
    size += stride * (size_t)(r->down * side * v + PLANE_SLACK) + ROW_SLACK;
    r->strides[c] = (ptrdiff_t)stride;
    pl_plane *plane = &planes[c];
    plane->stride = r->strides[c];
    plane->x0 = r->first_x * side * h;
    plane->y0 = r->first_y * side * v;
    plane->width = least(r->across * side * h, up(record->width * h, record->hmax * reduction) - plane->x0);
    plane->height = least(r->down * side * v, up(record->height * v, record->vmax * reduction) - plane->y0);
  }
  uint8_t *data = pl_reserve(&scratch->planes, size);
  r->coefficients = pl_reserve(&scratch->coefficients, 2 * r->mcu.num_coefficients * sizeof(int16_t));
  if (data == NULL || r->coefficients == NULL) return false;
  for (int c = 0; c < record->components; c++) planes[c].data = r->planes[c] = data + offsets[c];
  return true;
}

/* ---- rows of MCUs ------------------------------------------------------------------------------------------------ */

/* Start reading row `y` of MCUs at the last seek point that is not right of the region. */
static bool seek(const region *r, int y, pl_cursor *cursor) {
  const pl_record *record = r->record;
  size_t index = (size_t)y * (size_t)record->points_x + (size_t)(r->first_x / record->every);
  const uint8_t *point = record->points + index * PL_POINT_BYTES;
  uint64_t position = pl_little32(point);
  if (position > (uint64_t)record->scan_bytes * 8) return false;
  cursor->bits = pl_bits_at(record->bits, record->scan_bytes, position);
  for (int c = 0; c < 3; c++) cursor->dc[c] = (int16_t)(uint16_t)pl_little16(point + 4 + 2 * c);
  cursor->wrong = 0;
  return true;
}

/* Transform the blocks of `n` MCUs from `x` on, of row `y`; both counted from the region's corner. */
static void transform(const region *r, const int16_t *coefficients, int y, int x, int n) {
  for (int c = 0; c < r->record->components; c++) {
    int h = r->record->hs[c], v = r->record->vs[c], side = r->side[c];
    uint8_t *out = r->planes[c] + (ptrdiff_t)y * side * v * r->strides[c] + (ptrdiff_t)x * side * h;
    for (int row = 0; row < v; row++) {
      r->idct[c](coefficients, r->quant[c], n * h, out, r->strides[c]);
      coefficients += PL_RUN * h * 64;
      out += side * r->strides[c];
    }
  }
}

static pl_status decode_row(const region *r, int y, pl_stage stage) {
  pl_cursor cursor;
  if (!seek(r, r->first_y + y, &cursor)) return PL_BAD_POINTS;
  pl_skip_mcus(&r->mcu, &cursor, r->first_x % r->record->every);
  for (int x = 0; x < r->across; x += PL_RUN) {
    int n = least(PL_RUN, r->across - x);
    memset(r->coefficients, 0, r->mcu.num_coefficients * sizeof(int16_t));
    pl_read_mcus(&r->mcu, &cursor, n, r->coefficients);
    if (!pl_cursor_is_sound(&cursor)) return PL_BAD_BITS;
    if (stage != PL_ENTROPY_ONLY) transform(r, r->coefficients, y, x, n);
  }
  return PL_OK;
}

static pl_status decode_two_rows(const region *r, int y, pl_stage stage) {
  pl_cursor first, second;
  if (!seek(r, r->first_y + y, &first) || !seek(r, r->first_y + y + 1, &second)) return PL_BAD_POINTS;
  int16_t *of_second = r->coefficients + r->mcu.num_coefficients;
  // Reading two rows at once and forgetting them is faster than passing over first the one, then the other.
  for (int left = r->first_x % r->record->every; left > 0; left -= PL_RUN) {
    pl_read_two_rows(&r->mcu, &first, &second, least(PL_RUN, left), r->coefficients, of_second);
  }
  for (int x = 0; x < r->across; x += PL_RUN) {
    int n = least(PL_RUN, r->across - x);
    memset(r->coefficients, 0, 2 * r->mcu.num_coefficients * sizeof(int16_t));
    pl_read_two_rows(&r->mcu, &first, &second, n, r->coefficients, of_second);
    if (!pl_cursor_is_sound(&first) || !pl_cursor_is_sound(&second)) return PL_BAD_BITS;
    if (stage == PL_ENTROPY_ONLY) continue;
    transform(r, r->coefficients, y, x, n);
    transform(r, of_second, y + 1, x, n);
  }
  return PL_OK;
}

pl_status pl_decode_planes(const pl_record *record, pl_region pixels, pl_stage stage, pl_scratch *scratch,
                           pl_plane planes[3]) {
  region r = {.record = record};
  const pl_code_set *codes = NULL;
  if (!set_extent(&r, pixels)) return PL_BAD_REGION;
  pl_status status = pl_tables_for(scratch->tables, record, false, &codes);
  if (status != PL_OK) return status;
  pl_mcu_layout(record, codes, &r.mcu);
  for (int i = 0; i < r.mcu.num_blocks; i++) r.mcu.blocks[i].only_dc = r.side[r.mcu.blocks[i].component] == 1;
  read_quantisation(&r);
  if (!reserve_memory(&r, scratch, planes)) return PL_NO_MEMORY;
  for (int y = 0; y < r.down && status == PL_OK; y += 2) {
    status = y + 1 < r.down ? decode_two_rows(&r, y, stage) : decode_row(&r, y, stage);
  }
  return status;
}
