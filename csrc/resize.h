/* One plane resized, eight output rows at a time.
 *
 * Down first: eight rows are summed from the rows above and below them into a strip, which has the eight of a column
 * (or of two columns, as the instructions like it) side by side. Then across: an output sample of all eight rows is a
 * sum over the strip's columns, which a register holds as they lie. Between the passes and after them samples keep
 * PL_FRACTION_BITS bits behind the point, so that nothing is rounded to 8 bits before the colors are.
 */
#ifndef PACELINE_RESIZE_H
#define PACELINE_RESIZE_H

#include "paceline.h"
#include "taps.h"

#define PL_ROWS 8
#define PL_FRACTION_BITS 6 /* 255 << 6 fits 16 bits with sign, and so does a color before it is clipped */

/* What is shifted out after each pass, and half of it, which rounds. */
#define PL_DOWN_BITS (PL_WEIGHT_BITS - PL_FRACTION_BITS)
#define PL_DOWN_HALF (1 << (PL_DOWN_BITS - 1))
#define PL_ACROSS_BITS PL_WEIGHT_BITS
#define PL_ACROSS_HALF (1 << (PL_ACROSS_BITS - 1))

/* A row of output samples: of sample x, those of PL_ROWS rows from columns[x * PL_ROWS] on. */
static inline size_t pl_columns_bytes(int size) { return ((size_t)size * PL_ROWS * sizeof(int16_t) + 127) / 64 * 64; }

/* The memory of a strip: a multiple of 64. The filter across reads columns from its first start on. */
size_t pl_strip_bytes(const pl_taps *across);

/* Make output rows [y, y + PL_ROWS); rows from `down->size` on repeat the last. */
typedef void pl_resize_rows(const pl_plane *plane, const pl_taps *down, const pl_taps *across, int y, int16_t *strip,
                            int16_t *columns);

pl_resize_rows pl_resize_rows_scalar;
#if defined(__x86_64__)
pl_resize_rows pl_resize_rows_avx2;
#endif

/* Return the output row that row `row` of the eight from `y` on is. */
static inline int pl_row_of(const pl_taps *down, int y, int row) {
  return y + row < down->size ? y + row : down->size - 1;
}

/* Return how many columns of the plane the filter across reads, from `across->starts[0]` on: an even number. */
static inline int pl_strip_columns(const pl_taps *across) {
  return across->starts[across->size - 1] + across->num_taps - across->starts[0];
}

#endif
