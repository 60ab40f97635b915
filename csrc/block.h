/* Decoding one block, or two blocks of two places in the bits at once. Inlined into what decodes rows. */
#ifndef PACELINE_BLOCK_H
#define PACELINE_BLOCK_H

#include "entropy.h"

/* What a block can take, right or wrong: a DC symbol of 27 bits and 63 AC symbols of 26, and what a refill looks at. */
#define PL_MAX_BLOCK_BYTES ((27 + 63 * 26 + 7) / 8 + 16)

/* The natural position of each coefficient in zigzag order (T.81, figure A.6). */
static const uint8_t pl_natural_order[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

/* Return the value of the symbol that `entry` describes and `window` begins with: bits that begin with 1 are a
 * positive number, others one less than its negative's complement (T.81, F.2.2.1). No bits are 0. */
PL_INLINE int32_t pl_value_of(uint64_t window, uint32_t entry) {
  uint64_t value = window << (entry >> 8 & 63);
  uint64_t negative = ~(uint64_t)((int64_t)value >> 63);
  value = ((value ^ negative) >> 1) >> (~(entry >> 24) & 63);
  return (int32_t)((value ^ negative) - negative);
}

/* Read the DC difference: return how far into the block it leads, 0 or PL_ADVANCE_BAD. */
PL_INLINE uint32_t pl_read_dc(pl_bits *bits, const pl_codes *codes, int32_t *dc, bool guarded) {
  pl_bits_refill(bits, guarded);
  uint32_t entry = pl_look_up(codes, bits->window);
  *dc = (int16_t)(*dc + pl_value_of(bits->window, entry)); // hostile differences wrap
  pl_bits_take(bits, entry & 0xff);
  return entry >> 16 & 0xff;
}

/* Read an AC coefficient and advance `*at` to it. Return whether the block goes on. */
PL_INLINE bool pl_read_ac(pl_bits *bits, const pl_codes *codes, uint32_t *at, int16_t *block) {
  uint32_t entry = pl_look_up(codes, bits->window);
  int16_t value = (int16_t)pl_value_of(bits->window, entry);
  pl_bits_take(bits, entry & 0xff);
  *at += entry >> 16 & 0xff;
  if (*at < 63) {
    block[pl_natural_order[*at]] = value;
    return true;
  }
  if (*at == 63) block[63] = value;
  return false;
}

PL_INLINE bool pl_skip_ac(pl_bits *bits, const pl_codes *codes, uint32_t *at) {
  uint32_t entry = pl_look_up(codes, bits->window);
  pl_bits_take(bits, entry & 0xff);
  *at += entry >> 16 & 0xff;
  return *at < 63;
}

/* Read an AC coefficient, or pass over it where none is stored. */
PL_INLINE bool pl_next_ac(pl_bits *bits, const pl_codes *codes, uint32_t *at, int16_t *block, bool only_dc) {
  return only_dc ? pl_skip_ac(bits, codes, at) : pl_read_ac(bits, codes, at, block);
}

/* Read AC coefficients to the block's end, with no more than PL_REFILLED bits to a refill. */
PL_INLINE void pl_read_rest(pl_bits *bits, const pl_codes *codes, uint32_t *at, int16_t *block, bool guarded,
                            bool only_dc) {
  do pl_bits_refill(bits, guarded);
  while (pl_next_ac(bits, codes, at, block, only_dc) && pl_next_ac(bits, codes, at, block, only_dc));
}

PL_INLINE void pl_skip_block(pl_cursor *cursor, const pl_mcu_block *how) {
  pl_bits bits = cursor->bits; // in registers
  uint32_t at = pl_read_dc(&bits, how->dc, &cursor->dc[how->component], true);
  cursor->wrong |= at;
  do pl_bits_refill(&bits, true);
  while (pl_skip_ac(&bits, how->ac, &at) && pl_skip_ac(&bits, how->ac, &at));
  cursor->bits = bits;
  cursor->wrong |= at;
}

PL_INLINE void pl_read_block(pl_cursor *cursor, const pl_mcu_block *how, int16_t *block) {
  pl_bits bits = cursor->bits;
  uint32_t at = pl_read_dc(&bits, how->dc, &cursor->dc[how->component], true);
  cursor->wrong |= at;
  block[0] = (int16_t)cursor->dc[how->component];
  pl_read_rest(&bits, how->ac, &at, block, true, false);
  cursor->bits = bits;
  cursor->wrong |= at;
}

/* Pass over the AC coefficients of a block in steps, and add to `*seen` what these say of their values. Return whether
 * it ended well; if not, it may still be sound, and must be read. A step that is taken across the end of a block, whose
 * last coefficient ends it without a code, leads beyond its end, where the sum of advances is 191 or 64 to 127. */
PL_INLINE bool pl_step_over_rest(pl_bits *bits, const pl_codes *codes, const uint16_t *steps, uint32_t *seen,
                                 bool guarded) {
  uint32_t at = 0;
  while (at < 63) {
    pl_bits_refill(bits, guarded);
    for (int i = 0; i < 2 && at < 63; i++) {
      uint32_t step = steps[bits->window >> (64 - PL_STEP_BITS)];
      if (__builtin_expect(step == 0, 0)) step = pl_step_long(codes, bits->window);
      pl_bits_take(bits, step & 63);
      *seen |= step;
      at += step >> 8;
    }
  }
  return at == 63 || (at >= PL_ADVANCE_END && at < PL_ADVANCE_END + 63);
}

PL_INLINE void pl_read_two_blocks(pl_cursor *first, pl_cursor *second, const pl_mcu_block *how, int16_t *block_first,
                                  int16_t *block_second, bool guarded, bool only_dc) {
  const pl_codes *ac = how->ac;
  pl_bits a = first->bits, b = second->bits;
  uint32_t at_a = pl_read_dc(&a, how->dc, &first->dc[how->component], guarded);
  uint32_t at_b = pl_read_dc(&b, how->dc, &second->dc[how->component], guarded);
  first->wrong |= at_a;
  second->wrong |= at_b;
  block_first[0] = (int16_t)first->dc[how->component];
  block_second[0] = (int16_t)second->dc[how->component];
  for (;;) {
    pl_bits_refill(&a, guarded);
    pl_bits_refill(&b, guarded);
    if (!pl_next_ac(&a, ac, &at_a, block_first, only_dc)) {
      pl_read_rest(&b, ac, &at_b, block_second, guarded, only_dc);
      break;
    }
    if (!pl_next_ac(&b, ac, &at_b, block_second, only_dc)) {
      pl_read_rest(&a, ac, &at_a, block_first, guarded, only_dc);
      break;
    }
    if (!pl_next_ac(&a, ac, &at_a, block_first, only_dc)) {
      pl_read_rest(&b, ac, &at_b, block_second, guarded, only_dc);
      break;
    }
    if (!pl_next_ac(&b, ac, &at_b, block_second, only_dc)) {
      pl_read_rest(&a, ac, &at_a, block_first, guarded, only_dc);
      break;
    }
  }
  first->bits = a;
  second->bits = b;
  first->wrong |= at_a;
  second->wrong |= at_b;
}

#endif
