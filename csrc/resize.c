/* Eight rows of a plane resized, in plain C: what every other version must equal bit for bit. */
#include "resize.h"

#define BLOCK 32 /* columns that are summed at once: so are they in AVX2, and compilers vectorize it elsewhere */

size_t pl_strip_bytes(const pl_taps *across) {
  size_t blocks = ((size_t)pl_strip_columns(across) + BLOCK - 1) / BLOCK;
  return blocks * BLOCK * PL_ROWS * sizeof(int16_t);
}

/* Sum `num_taps` rows of BLOCK columns from `source` on, rows `stride` bytes apart. */
static void sum_down(const uint8_t *source, ptrdiff_t stride, const int16_t *weights, int num_taps,
                     int32_t sums[BLOCK]) {
  for (int x = 0; x < BLOCK; x++) sums[x] = PL_DOWN_HALF;
  for (int tap = 0; tap < num_taps; tap++, source += stride) {
    const int16_t weight = weights[tap]; /* products of 16 bits are what compilers make vectors of */
    for (int x = 0; x < BLOCK; x++) sums[x] += weight * (int16_t)source[x];
  }
}

/* Write a row's sums to their places in the strip: column x of row r at x * PL_ROWS + r. */
static void write_row(const int32_t sums[BLOCK], int16_t *strip) {
  for (int x = 0; x < BLOCK; x++) strip[x * PL_ROWS] = (int16_t)(sums[x] >> PL_DOWN_BITS);
}

static void resize_down(const pl_plane *plane, const pl_taps *down, int y, int first, int num_columns,
                        int16_t *strip) {
  int32_t sums[BLOCK];
  for (int x = 0; x < num_columns; x += BLOCK) {
    for (int row = 0; row < PL_ROWS; row++) {
      const int i = pl_row_of(down, y, row);
      const uint8_t *source = plane->data + down->starts[i] * plane->stride + first + x;
      sum_down(source, plane->stride, down->weights + (ptrdiff_t)i * down->num_taps, down->num_taps, sums);
      write_row(sums, strip + (ptrdiff_t)x * PL_ROWS + row);
    }
  }
}

static void resize_across(const pl_taps *across, const int16_t *strip, int16_t *columns) {
  for (int i = 0; i < across->size; i++, columns += PL_ROWS) {
    const int16_t *samples = strip + (ptrdiff_t)(across->starts[i] - across->starts[0]) * PL_ROWS;
    const int16_t *weights = across->weights + (ptrdiff_t)i * across->num_taps;
    int32_t sums[PL_ROWS];
    for (int row = 0; row < PL_ROWS; row++) sums[row] = PL_ACROSS_HALF;
    for (int tap = 0; tap < across->num_taps; tap++, samples += PL_ROWS) {
      const int16_t weight = weights[tap];
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 1 /* once unrolled, gcc makes no vector of it: 1.6 times slower, measured */
#endif
      for (int row = 0; row < PL_ROWS; row++) sums[row] += weight * samples[row];
    }
    for (int row = 0; row < PL_ROWS; row++) columns[row] = (int16_t)(sums[row] >> PL_ACROSS_BITS);
  }
}

void pl_resize_rows_scalar(const pl_plane *plane, const pl_taps *down, const pl_taps *across, int y, int16_t *strip,
                           int16_t *columns) {
  resize_down(plane, down, y, across->starts[0], pl_strip_columns(across), strip);
  resize_across(across, strip, columns);
}
