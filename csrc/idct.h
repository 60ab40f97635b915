/* libjpeg's accurate integer inverse DCT ("islow"), and dequantization before it.
 *
 * The algorithm is that of C. Loeffler, A. Ligtenberg and G. Moschytz, "Practical fast 1-D DCT algorithms with 11
 * multiplications" (ICASSP 1989), in 13-bit fixed point, columns first and 2 more bits kept between the passes. Bits
 * are those of libjpeg-turbo's vector code: products of dequantization wrap to 16 bits, and results of a pass are
 * clamped to 16 bits. Blocks of real images reach neither.
 */
#ifndef PACELINE_IDCT_H
#define PACELINE_IDCT_H

#include <stddef.h>
#include <stdint.h>

#define PL_FIXED_BITS 13
#define PL_EXTRA_BITS 2 /* kept between the passes */

/* Results of the column pass keep the extra bits; those of the row pass lose all, 3 more for the factor 8 of two
 * dimensions, and are centered on 128. Biases round to nearest. */
#define PL_COLUMN_SHIFT (PL_FIXED_BITS - PL_EXTRA_BITS)
#define PL_COLUMN_BIAS (1 << (PL_COLUMN_SHIFT - 1))
#define PL_ROW_SHIFT (PL_FIXED_BITS + PL_EXTRA_BITS + 3)
#define PL_ROW_BIAS ((1 << (PL_ROW_SHIFT - 1)) + (128 << PL_ROW_SHIFT))

/* The algorithm's constants, times 2^13: jidctint.c of libjpeg names them so. */
enum {
  PL_0_298631336 = 2446,
  PL_0_390180644 = 3196,
  PL_0_541196100 = 4433,
  PL_0_765366865 = 6270,
  PL_0_899976223 = 7373,
  PL_1_175875602 = 9633,
  PL_1_501321110 = 12299,
  PL_1_847759065 = 15137,
  PL_1_961570560 = 16069,
  PL_2_053119869 = 16819,
  PL_2_562915447 = 20995,
  PL_3_072711026 = 25172
};

/* Transform `n` blocks that lie one behind the other in `blocks` (natural order, 64-byte aligned) to samples side by
 * side in `out`, 8 rows `stride` apart. `quant`: 64 factors as bits of int16, 64-byte aligned. */
typedef void pl_idct(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out, ptrdiff_t stride);

pl_idct pl_idct_scalar;
#if defined(__x86_64__)
/* Reads and writes an even number of blocks: with an odd `n` one more, whose samples are junk. */
pl_idct pl_idct_avx2;
#endif

#endif
