/* From entropy-coded bits to coefficients: blocks of one row of MCUs, or of two rows at once.
 *
 * Decoding a symbol is one chain of instructions that wait for one another: a look-up, a shift, the next look-up. Two
 * rows are two chains, which a processor works on side by side. Compiled for BMI2 the same source measured no faster.
 */
#ifndef PACELINE_ENTROPY_H
#define PACELINE_ENTROPY_H

#include "huffman.h"
#include "record.h"


#define PL_RUN 8             /* MCUs decoded before their blocks are transformed; even, so that blocks come in pairs */

/* Where a row of MCUs is being read, and the DC predictors there. */
typedef struct {
  pl_bits bits;
  int32_t dc[3];
  uint32_t wrong; /* bit 6: a block was */
} pl_cursor;

/* One block of an MCU: what it is decoded with, and where among the coefficients of a run of MCUs it lies. Blocks of
 * one component and one row of blocks lie side by side. */
typedef struct {
  const pl_codes *dc, *ac;
  int component;
  bool only_dc; /* other coefficients need not be stored: measured, that saves a fifth of the reading */
  size_t offset, step; /* of the first MCU's block; from MCU to MCU; in coefficients */
} pl_mcu_block;

typedef struct {
  int num_blocks;
  pl_mcu_block blocks[PL_MAX_MCU_BLOCKS];
  size_t num_coefficients; /* of a run of PL_RUN MCUs */
} pl_mcu;

/* Lay out the blocks of an image's MCUs, of which all coefficients are stored. */
void pl_mcu_layout(const pl_record *record, const pl_code_set *codes, pl_mcu *mcu);

/* Pass over `n` MCUs of one row. */
void pl_skip_mcus(const pl_mcu *mcu, pl_cursor *cursor, int n);

/* Read `n` <= PL_RUN MCUs of one row into `out`, which is zero: coefficients in natural order, not dequantized. */
void pl_read_mcus(const pl_mcu *mcu, pl_cursor *cursor, int n, int16_t *out);

/* Read `n` MCUs of each of two rows. */
void pl_read_two_rows(const pl_mcu *mcu, pl_cursor *first, pl_cursor *second, int n, int16_t *out_first,
                      int16_t *out_second);

/* Return whether the bits up to here were codes, and were there. */
static inline bool pl_cursor_is_sound(const pl_cursor *cursor) {
  return (cursor->wrong & PL_ADVANCE_BAD) == 0 && !pl_bits_overran(&cursor->bits);
}

#endif
