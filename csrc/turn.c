/* Writing eight rows of samples in their direction, in plain C. */
#include "turn.h"

#include <string.h>

/* As the EXIF standard (CIPA DC-008, tag 0x0112) numbers where row 0 and column 0 of the stored image are. */
static const pl_turn ORIENTATIONS[] = {
    {0, 0, 0}, /* 1: top, left */
    {0, 1, 0}, /* 2: top, right */
    {1, 1, 0}, /* 3: bottom, right */
    {1, 0, 0}, /* 4: bottom, left */
    {0, 0, 1}, /* 5: left, top */
    {1, 0, 1}, /* 6: right, top */
    {1, 1, 1}, /* 7: right, bottom */
    {0, 1, 1}, /* 8: left, bottom */
};

pl_turn pl_turn_of(int orientation, int flip) {
  pl_turn turn = ORIENTATIONS[orientation >= 1 && orientation <= 8 ? orientation - 1 : 0];
  /* What runs from left to right when upright is a stored row, or a stored column. */
  if (flip && turn.transposed) turn.reverse_rows = !turn.reverse_rows;
  if (flip && !turn.transposed) turn.reverse_columns = !turn.reverse_columns;
  return turn;
}

static int rows_from(int size, int y) { return size - y < PL_ROWS ? size - y : PL_ROWS; }

/* A sample of all rows is a piece of a row of the output. */
static void write_transposed(const uint8_t *columns, int size, int y, pl_turn turn, uint8_t *out) {
  const size_t num_rows = (size_t)rows_from(size, y);
  out += turn.reverse_rows ? size - y - (int)num_rows : y;
  for (int x = 0; x < size; x++, columns += PL_ROWS) {
    uint8_t *piece = out + (ptrdiff_t)(turn.reverse_columns ? size - 1 - x : x) * size;
    if (!turn.reverse_rows) {
      memcpy(piece, columns, num_rows);
    } else {
      for (size_t row = 0; row < num_rows; row++) piece[num_rows - 1 - row] = columns[row];
    }
  }
}

static void write_row(const uint8_t *columns, int size, int reversed, uint8_t *out) {
  if (reversed) {
    for (int x = 0; x < size; x++) out[size - 1 - x] = columns[(ptrdiff_t)x * PL_ROWS];
  } else {
    for (int x = 0; x < size; x++) out[x] = columns[(ptrdiff_t)x * PL_ROWS];
  }
}

void pl_write_rows_scalar(const uint8_t *columns, int size, int y, pl_turn turn, uint8_t *out) {
  if (turn.transposed) {
    write_transposed(columns, size, y, turn, out);
    return;
  }
  const int num_rows = rows_from(size, y);
  for (int row = 0; row < num_rows; row++) {
    const int to = turn.reverse_rows ? size - 1 - (y + row) : y + row;
    write_row(columns + row, size, turn.reverse_columns, out + (ptrdiff_t)to * size);
  }
}
