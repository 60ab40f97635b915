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
 * dimensions, and are centered on 128. Biases round to nearest. Passes to 4 or 2 values give twice or four times as
 * much, and so lose 1 or 2 bits more. */
#define PL_COLUMN_SHIFT(values) (PL_FIXED_BITS - PL_EXTRA_BITS + 2 - (values) / 4)
#define PL_COLUMN_BIAS(values) (1 << (PL_COLUMN_SHIFT(values) - 1))
#define PL_ROW_SHIFT(values) (PL_COLUMN_SHIFT(values) + 2 * PL_EXTRA_BITS + 3)
#define PL_ROW_BIAS(values) ((1 << (PL_ROW_SHIFT(values) - 1)) + (128 << PL_ROW_SHIFT(values)))

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

/* And those of the reduced transforms, as jidctred.c names them. */
enum {
  PL_0_211164243 = 1730,
  PL_0_509795579 = 4176,
  PL_0_601344887 = 4926,
  PL_0_720959822 = 5906,
  PL_0_850430095 = 6967,
  PL_1_061594337 = 8697,
  PL_1_272758580 = 10426,
  PL_1_451774981 = 11893,
  PL_2_172734803 = 17799,
  PL_3_624509785 = 29692
};

/* Transform `n` blocks that lie one behind the other in `blocks` (natural order, 64-byte aligned) to samples side by
 * side in `out`, 8 rows `stride` apart. `quant`: 64 factors as bits of int16, 64-byte aligned. */
typedef void pl_idct(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out, ptrdiff_t stride);

pl_idct pl_idct_scalar;
#if defined(__x86_64__)
/* Reads and writes an even number of blocks: with an odd `n` one more, whose samples are junk. */
pl_idct pl_idct_avx2;
#endif

/* To 4x4, 2x2 and 1x1 samples, as libjpeg's scaled decoding: means of the 64 that the transform gives before rounding.
 *
 * The mean of samples 2i and 2i + 1 of 8 is a sum of cosines as the inverse of a DCT of 4, to which frequency 4 gives
 * nothing. The mean of four is one as of a DCT of 2, to which frequencies 2, 4 and 6 give nothing. They may read and
 * write up to seven blocks more, to a multiple of 8, whose samples are junk. */
pl_idct pl_idct_to_4_scalar, pl_idct_to_2_scalar, pl_idct_to_1;
#if defined(__x86_64__)
pl_idct pl_idct_to_4_avx2, pl_idct_to_2_avx2;
#endif

#endif
