/* The inverse DCT for every processor, a block at a time. Its arithmetic is that of the vector code, wrap for wrap. */
#include "idct.h"

/* Sums wrap at 32 bits, which signed numbers of C may not. */
static uint32_t times(int16_t value, int16_t factor) { return (uint32_t)((int32_t)value * factor); }

static int16_t wrapped(int32_t value) { return (int16_t)(uint16_t)(uint32_t)value; }

static int16_t clamped(int32_t value) { return (int16_t)(value < -32768 ? -32768 : value > 32767 ? 32767 : value); }

static uint8_t sample_of(int32_t value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

/* Transform the columns of 8 rows of 8 values, add `bias` and shift right by `shift`. Every step is the same for all
 * columns, so that compilers make vectors of them. The names are jidctint.c's. */
static void transform(int16_t *restrict v, uint32_t bias, int shift) {
  for (int x = 0; x < 8; x++) {
    int16_t v0 = v[x], v1 = v[8 + x], v2 = v[16 + x], v3 = v[24 + x];
    int16_t v4 = v[32 + x], v5 = v[40 + x], v6 = v[48 + x], v7 = v[56 + x];

    uint32_t tmp0 = times(wrapped(v0 + v4), 1 << PL_FIXED_BITS) + bias;
    uint32_t tmp1 = times(wrapped(v0 - v4), 1 << PL_FIXED_BITS) + bias;
    uint32_t tmp2 = times(v2, PL_0_541196100) + times(v6, PL_0_541196100 - PL_1_847759065);
    uint32_t tmp3 = times(v2, PL_0_541196100 + PL_0_765366865) + times(v6, PL_0_541196100);
    uint32_t even0 = tmp0 + tmp3, even1 = tmp1 + tmp2, even2 = tmp1 - tmp2, even3 = tmp0 - tmp3;

    int16_t sum37 = wrapped(v3 + v7), sum15 = wrapped(v1 + v5);
    uint32_t z3 = times(sum37, PL_1_175875602 - PL_1_961570560) + times(sum15, PL_1_175875602);
    uint32_t z4 = times(sum37, PL_1_175875602) + times(sum15, PL_1_175875602 - PL_0_390180644);
    uint32_t odd0 = times(v7, -PL_0_899976223) + times(v1, PL_1_501321110 - PL_0_899976223) + z4;
    uint32_t odd1 = times(v5, -PL_2_562915447) + times(v3, PL_3_072711026 - PL_2_562915447) + z3;
    uint32_t odd2 = times(v5, PL_2_053119869 - PL_2_562915447) + times(v3, -PL_2_562915447) + z4;
    uint32_t odd3 = times(v7, PL_0_298631336 - PL_0_899976223) + times(v1, -PL_0_899976223) + z3;

    v[x] = clamped((int32_t)(even0 + odd0) >> shift);
    v[56 + x] = clamped((int32_t)(even0 - odd0) >> shift);
    v[8 + x] = clamped((int32_t)(even1 + odd1) >> shift);
    v[48 + x] = clamped((int32_t)(even1 - odd1) >> shift);
    v[16 + x] = clamped((int32_t)(even2 + odd2) >> shift);
    v[40 + x] = clamped((int32_t)(even2 - odd2) >> shift);
    v[24 + x] = clamped((int32_t)(even3 + odd3) >> shift);
    v[32 + x] = clamped((int32_t)(even3 - odd3) >> shift);
  }
}

static void transform_block(const int16_t *block, const int16_t *quant, uint8_t *out, ptrdiff_t stride) {
  int16_t columns[64], rows[64];
  for (int i = 0; i < 64; i++) columns[i] = wrapped(block[i] * quant[i]);
  transform(columns, PL_COLUMN_BIAS(8), PL_COLUMN_SHIFT(8));
  for (int y = 0; y < 8; y++) {
    for (int x = 0; x < 8; x++) rows[8 * x + y] = columns[8 * y + x];
  }
  transform(rows, PL_ROW_BIAS(8), PL_ROW_SHIFT(8));
  for (int y = 0; y < 8; y++) {
    for (int x = 0; x < 8; x++) out[x] = sample_of(rows[8 * x + y]);
    out += stride;
  }
}

void pl_idct_scalar(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out, ptrdiff_t stride) {
  for (int i = 0; i < n; i++) transform_block(blocks + 64 * (ptrdiff_t)i, quant, out + 8 * (ptrdiff_t)i, stride);
}

/* ---- to fewer samples ------------------------------------------------------------------------------------------ */

/* Transform the columns of 8 rows of 8 values to 4 rows, twice as large as those of `transform`. */
static void columns_to_4(const int16_t *restrict v, int16_t *restrict out, uint32_t bias, int shift) {
  for (int x = 0; x < 8; x++) {
    int16_t v1 = v[8 + x], v2 = v[16 + x], v3 = v[24 + x], v5 = v[40 + x], v6 = v[48 + x], v7 = v[56 + x];
    uint32_t tmp0 = times(v[x], 2 << PL_FIXED_BITS) + bias;
    uint32_t tmp2 = times(v2, PL_1_847759065) + times(v6, -PL_0_765366865);
    uint32_t even0 = tmp0 + tmp2, even1 = tmp0 - tmp2;
    uint32_t odd0 = times(v7, -PL_0_509795579) + times(v5, -PL_0_601344887) + times(v3, PL_0_899976223) +
                    times(v1, PL_2_562915447);
    uint32_t odd1 = times(v7, -PL_0_211164243) + times(v5, PL_1_451774981) + times(v3, -PL_2_172734803) +
                    times(v1, PL_1_061594337);
    out[x] = clamped((int32_t)(even0 + odd0) >> shift);
    out[24 + x] = clamped((int32_t)(even0 - odd0) >> shift);
    out[8 + x] = clamped((int32_t)(even1 + odd1) >> shift);
    out[16 + x] = clamped((int32_t)(even1 - odd1) >> shift);
  }
}

/* And to 2 rows, four times as large. */
static void columns_to_2(const int16_t *restrict v, int16_t *restrict out, uint32_t bias, int shift) {
  for (int x = 0; x < 8; x++) {
    int16_t v1 = v[8 + x], v3 = v[24 + x], v5 = v[40 + x], v7 = v[56 + x];
    uint32_t even = ((uint32_t)(int32_t)v[x] << (PL_FIXED_BITS + 2)) + bias;
    uint32_t odd = times(v7, -PL_0_720959822) + times(v5, PL_0_850430095) + times(v3, -PL_1_272758580) +
                   times(v1, PL_3_624509785);
    out[x] = clamped((int32_t)(even + odd) >> shift);
    out[8 + x] = clamped((int32_t)(even - odd) >> shift);
  }
}

/* Two blocks at once in the second pass: 4 rows of each are 8 columns. */
static void transform_to_4(const int16_t *blocks, const int16_t *quant, uint8_t *out, ptrdiff_t stride) {
  int16_t values[64], four[32], turned[64], rows[32];
  for (int block = 0; block < 2; block++) {
    for (int i = 0; i < 64; i++) values[i] = wrapped(blocks[64 * block + i] * quant[i]);
    columns_to_4(values, four, PL_COLUMN_BIAS(4), PL_COLUMN_SHIFT(4));
    for (int y = 0; y < 4; y++) {
      for (int x = 0; x < 8; x++) turned[8 * x + 4 * block + y] = four[8 * y + x];
    }
  }
  columns_to_4(turned, rows, PL_ROW_BIAS(4), PL_ROW_SHIFT(4));
  for (int y = 0; y < 4; y++, out += stride) {
    for (int x = 0; x < 8; x++) out[x] = sample_of(rows[8 * (x % 4) + x / 4 * 4 + y]);
  }
}

/* Four blocks at once: 2 rows of each. */
static void transform_to_2(const int16_t *blocks, const int16_t *quant, uint8_t *out, ptrdiff_t stride) {
  int16_t values[64], two[16], turned[64], rows[16];
  for (int block = 0; block < 4; block++) {
    for (int i = 0; i < 64; i++) values[i] = wrapped(blocks[64 * block + i] * quant[i]);
    columns_to_2(values, two, PL_COLUMN_BIAS(2), PL_COLUMN_SHIFT(2));
    for (int y = 0; y < 2; y++) {
      for (int x = 0; x < 8; x++) turned[8 * x + 2 * block + y] = two[8 * y + x];
    }
  }
  columns_to_2(turned, rows, PL_ROW_BIAS(2), PL_ROW_SHIFT(2));
  for (int y = 0; y < 2; y++, out += stride) {
    for (int x = 0; x < 8; x++) out[x] = sample_of(rows[8 * (x % 2) + x / 2 * 2 + y]);
  }
}

void pl_idct_to_4_scalar(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out, ptrdiff_t stride) {
  for (int i = 0; i < n; i += 2) transform_to_4(blocks + 64 * (ptrdiff_t)i, quant, out + 4 * (ptrdiff_t)i, stride);
}

void pl_idct_to_2_scalar(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out, ptrdiff_t stride) {
  for (int i = 0; i < n; i += 4) transform_to_2(blocks + 64 * (ptrdiff_t)i, quant, out + 2 * (ptrdiff_t)i, stride);
}

/* The mean of a block is an eighth of its first coefficient. There is no vector code of libjpeg-turbo for this: its C
 * clamps by a table of 10 bits, so that impossible values wrap. */
void pl_idct_to_1(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out, ptrdiff_t stride) {
  (void)stride;
  for (int i = 0; i < n; i++) {
    const int32_t mean = (blocks[64 * (ptrdiff_t)i] * quant[0] + 4) >> 3;
    out[i] = sample_of(((mean + 512) & 1023) - 512 + 128);
  }
}
