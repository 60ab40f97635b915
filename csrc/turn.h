/* The eight symmetries of the square: what turns a stored image upright and mirrors it, while it is written. */
#ifndef PACELINE_TURN_H
#define PACELINE_TURN_H

#include <stdint.h>

#include "resize.h"

/* First rows or columns of the stored image are reversed, then it is transposed. */
typedef struct {
  int reverse_rows, reverse_columns, transposed;
} pl_turn;

/* Return what turns an image of EXIF orientation 1..8 upright (others: as stored), mirrored left to right if `flip`. */
pl_turn pl_turn_of(int orientation, int flip);

/* Write rows [y, y + PL_ROWS) of a channel of size x size, as far as there are any, to their places in `out`. `columns`
 * has sample x of the eight rows from x * PL_ROWS on. */
typedef void pl_write_rows(const uint8_t *columns, int size, int y, pl_turn turn, uint8_t *out);

pl_write_rows pl_write_rows_scalar;
#if defined(__x86_64__)
pl_write_rows pl_write_rows_avx2;
#endif

#endif
