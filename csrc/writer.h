/* Writing a record: header, seek points and bits (docs/reference/indexed-jpeg.md). */
#ifndef PACELINE_WRITER_H
#define PACELINE_WRITER_H

#include "record.h"

typedef struct {
  uint8_t *data; /* in a buffer that the caller keeps */
  size_t point_at, points_end, bits_at, at; /* offsets: of the next seek point, of the next byte of bits */
  uint64_t held; /* bits not yet written, the last one lowest */
  uint32_t num_held; /* < 32 */
} pl_writer;

/* Begin the record of an image with the geometry of `shape`, PL_ENTRY_BYTES into `buffer`. `quant`: a table of 64
 * factors in natural order for each component. `tables`: dc0, ac0, dc1, ac1, NULL where there is none. `max_scan_bytes`
 * bounds the bits. Return false where there is no memory. */
bool pl_writer_open(pl_writer *writer, pl_buffer *buffer, const pl_record *shape, const uint16_t *const quant[3],
                    const uint8_t *const tables[4], size_t max_scan_bytes);

/* Set where the Huffman tables lie in the record, and which there are. */
void pl_writer_tables(const pl_writer *writer, pl_record *record);

/* Return where the next bits go when whole bytes precede them. Whoever writes there, PL_TAIL_BYTES beyond the bound at
 * most, adds the bits by `pl_writer_take`. */
uint8_t *pl_writer_next(pl_writer *writer);

/* Add `num_bits` bits that were written at `pl_writer_next`. */
void pl_writer_take(pl_writer *writer, uint64_t num_bits);

/* Add a seek point: bit `position`, and the DC predictors there. */
void pl_writer_point(pl_writer *writer, uint64_t position, const int32_t dc[3]);

uint64_t pl_writer_position(const pl_writer *writer);

/* Add the low `n` <= 32 bits of `value`. */
void pl_writer_put(pl_writer *writer, uint32_t value, uint32_t n);

/* Add bits `from` to `to` of `bytes`, behind which PL_TAIL_BYTES may be read. */
void pl_writer_copy(pl_writer *writer, const uint8_t *bytes, uint64_t from, uint64_t to);

/* End the record, and return its size. */
size_t pl_writer_close(pl_writer *writer);

#endif
