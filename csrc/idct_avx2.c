/* The inverse DCT with AVX2: two blocks at once, one in each half of the registers, bit for bit as idct.c. */
#include "idct.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 static inline __attribute__((always_inline, target("avx2")))

/* 2 x 8 numbers of 32 bits, widened from one register of 2 x 8 numbers of 16: the lower and upper four of each half. */
typedef struct {
  __m256i low, high;
} wide;

AVX2 wide plus(wide a, wide b) { return (wide){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }

AVX2 wide minus(wide a, wide b) { return (wide){_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }

/* Two rows, number by number beside each other: what a multiply-and-add of pairs takes. */
AVX2 wide pairs(__m256i a, __m256i b) { return (wide){_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)}; }

/* a x factor_a + b x factor_b, of pairs(a, b). */
AVX2 wide weighted(wide ab, int factor_a, int factor_b) {
  const __m256i factors = _mm256_set1_epi32((int)((uint32_t)(uint16_t)factor_a | (uint32_t)factor_b << 16));
  return (wide){_mm256_madd_epi16(ab.low, factors), _mm256_madd_epi16(ab.high, factors)};
}

/* a x 2^bits: a in the upper half of 32 bits, shifted down. */
AVX2 wide scaled(__m256i a, int bits) {
  wide upper = pairs(_mm256_setzero_si256(), a);
  return (wide){_mm256_srai_epi32(upper.low, 16 - bits), _mm256_srai_epi32(upper.high, 16 - bits)};
}

AVX2 __m256i narrowed(wide a, int shift) {
  return _mm256_packs_epi32(_mm256_srai_epi32(a.low, shift), _mm256_srai_epi32(a.high, shift));
}

/* Set *sum to even + odd and *difference to even - odd, biased, shifted and clamped to 16 bits. */
AVX2 void combine(wide even, wide odd, int bias, int shift, __m256i *sum, __m256i *difference) {
  wide biases = {_mm256_set1_epi32(bias), _mm256_set1_epi32(bias)};
  even = plus(even, biases);
  *sum = narrowed(plus(even, odd), shift);
  *difference = narrowed(minus(even, odd), shift);
}

/* Transform along the 8 registers. The names are jidctint.c's. */
AVX2 void transform(__m256i v[8], int bias, int shift) {
  wide v26 = pairs(v[2], v[6]);
  wide tmp0 = scaled(_mm256_add_epi16(v[0], v[4]), PL_FIXED_BITS);
  wide tmp1 = scaled(_mm256_sub_epi16(v[0], v[4]), PL_FIXED_BITS);
  wide tmp2 = weighted(v26, PL_0_541196100, PL_0_541196100 - PL_1_847759065);
  wide tmp3 = weighted(v26, PL_0_541196100 + PL_0_765366865, PL_0_541196100);

  wide sums = pairs(_mm256_add_epi16(v[3], v[7]), _mm256_add_epi16(v[1], v[5]));
  wide z3 = weighted(sums, PL_1_175875602 - PL_1_961570560, PL_1_175875602);
  wide z4 = weighted(sums, PL_1_175875602, PL_1_175875602 - PL_0_390180644);
  wide v71 = pairs(v[7], v[1]), v53 = pairs(v[5], v[3]);
  wide odd0 = plus(z4, weighted(v71, -PL_0_899976223, PL_1_501321110 - PL_0_899976223));
  wide odd1 = plus(z3, weighted(v53, -PL_2_562915447, PL_3_072711026 - PL_2_562915447));
  wide odd2 = plus(z4, weighted(v53, PL_2_053119869 - PL_2_562915447, -PL_2_562915447));
  wide odd3 = plus(z3, weighted(v71, PL_0_298631336 - PL_0_899976223, -PL_0_899976223));

  combine(plus(tmp0, tmp3), odd0, bias, shift, &v[0], &v[7]);
  combine(plus(tmp1, tmp2), odd1, bias, shift, &v[1], &v[6]);
  combine(minus(tmp1, tmp2), odd2, bias, shift, &v[2], &v[5]);
  combine(minus(tmp0, tmp3), odd3, bias, shift, &v[3], &v[4]);
}

/* Replace two registers by their 16-bit numbers in turn. */
AVX2 void interleave16(__m256i *a, __m256i *b) {
  __m256i first = *a;
  *a = _mm256_unpacklo_epi16(first, *b);
  *b = _mm256_unpackhi_epi16(first, *b);
}

AVX2 void interleave8(__m256i *a, __m256i *b) {
  __m256i first = *a;
  *a = _mm256_unpacklo_epi8(first, *b);
  *b = _mm256_unpackhi_epi8(first, *b);
}

/* Transpose both 8 x 8 blocks: three times each pair of registers is interleaved, from the farthest to the nearest. */
AVX2 void transpose(__m256i v[8]) {
  for (int i = 0; i < 4; i++) interleave16(&v[i], &v[i + 4]);
  for (int i = 0; i < 8; i += 4) {
    interleave16(&v[i], &v[i + 2]);
    interleave16(&v[i + 1], &v[i + 3]);
  }
  for (int i = 0; i < 8; i += 2) interleave16(&v[i], &v[i + 1]);
}

/* Write rows y and y + 1 of both blocks, side by side. */
AVX2 void store_two_rows(__m256i rows, uint8_t *out, ptrdiff_t stride) {
  // In each half lie 8 bytes of row y, then 8 of row y + 1: bring the halves of a row together.
  __m256i joined = _mm256_permute4x64_epi64(rows, 0xd8);
  _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(joined));
  _mm_storeu_si128((__m128i *)(out + stride), _mm256_extracti128_si256(joined, 1));
}

/* Clamp columns of samples to bytes, and write them as rows. */
AVX2 void store_transposed(const __m256i v[8], uint8_t *out, ptrdiff_t stride) {
  __m256i p[4];
  for (int i = 0; i < 4; i++) p[i] = _mm256_packus_epi16(v[2 * i], v[2 * i + 1]);
  interleave8(&p[0], &p[2]);
  interleave8(&p[1], &p[3]);
  interleave8(&p[0], &p[1]);
  interleave8(&p[2], &p[3]);
  interleave8(&p[0], &p[2]);
  interleave8(&p[1], &p[3]);
  store_two_rows(p[0], out, stride);
  store_two_rows(p[2], out + 2 * stride, stride);
  store_two_rows(p[1], out + 4 * stride, stride);
  store_two_rows(p[3], out + 6 * stride, stride);
}

/* Read both blocks, the second `apart` blocks behind the first, and dequantize them. */
AVX2 void load(const int16_t *blocks, int apart, const int16_t *quant, __m256i v[8]) {
  for (int y = 0; y < 8; y++) {
    const int16_t *first = blocks + 8 * y, *second = first + 64 * apart;
    __m256i factors = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(quant + 8 * y)));
    v[y] = _mm256_mullo_epi16(_mm256_loadu2_m128i((const __m128i *)second, (const __m128i *)first), factors);
  }
}

__attribute__((target("avx2"))) void pl_idct_avx2(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out,
                                                  ptrdiff_t stride) {
  for (int i = 0; i < n; i += 2, blocks += 128, out += 16) {
    __m256i v[8];
    load(blocks, 1, quant, v);
    transform(v, PL_COLUMN_BIAS(8), PL_COLUMN_SHIFT(8));
    transpose(v);
    transform(v, PL_ROW_BIAS(8), PL_ROW_SHIFT(8));
    store_transposed(v, out, stride);
  }
}

/* ---- to fewer samples ------------------------------------------------------------------------------------------ */

/* Transform along the 8 registers to 4. */
AVX2 void transform_to_4(const __m256i v[8], int bias, int shift, __m256i out[4]) {
  wide v26 = pairs(v[2], v[6]), v75 = pairs(v[7], v[5]), v31 = pairs(v[3], v[1]);
  wide tmp0 = scaled(v[0], PL_FIXED_BITS + 1), tmp2 = weighted(v26, PL_1_847759065, -PL_0_765366865);
  wide odd0 = plus(weighted(v75, -PL_0_509795579, -PL_0_601344887), weighted(v31, PL_0_899976223, PL_2_562915447));
  wide odd1 = plus(weighted(v75, -PL_0_211164243, PL_1_451774981), weighted(v31, -PL_2_172734803, PL_1_061594337));
  combine(plus(tmp0, tmp2), odd0, bias, shift, &out[0], &out[3]);
  combine(minus(tmp0, tmp2), odd1, bias, shift, &out[1], &out[2]);
}

/* And to 2. */
AVX2 void transform_to_2(const __m256i v[8], int bias, int shift, __m256i out[2]) {
  wide odd = plus(weighted(pairs(v[7], v[5]), -PL_0_720959822, PL_0_850430095),
                  weighted(pairs(v[3], v[1]), -PL_1_272758580, PL_3_624509785));
  combine(scaled(v[0], PL_FIXED_BITS + 2), odd, bias, shift, &out[0], &out[1]);
}

/* Four blocks at once. After the first pass, 4 rows of each of the first two lie in the lower halves of registers, and
 * those of the others in the upper: transposed, they are whole columns. */
__attribute__((target("avx2"))) void pl_idct_to_4_avx2(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out,
                                                       ptrdiff_t stride) {
  for (int i = 0; i < n; i += 4, blocks += 256, out += 16) {
    __m256i v[8], rows[8], columns[4];
    for (int block = 0; block < 2; block++) {
      load(blocks + 64 * block, 2, quant, v);
      transform_to_4(v, PL_COLUMN_BIAS(4), PL_COLUMN_SHIFT(4), rows + 4 * block);
    }
    transpose(rows);
    transform_to_4(rows, PL_ROW_BIAS(4), PL_ROW_SHIFT(4), columns);
    __m256i p[2] = {_mm256_packus_epi16(columns[0], columns[1]), _mm256_packus_epi16(columns[2], columns[3])};
    interleave8(&p[0], &p[1]);
    interleave8(&p[0], &p[1]);
    store_two_rows(_mm256_unpacklo_epi32(p[0], p[1]), out, stride);
    store_two_rows(_mm256_unpackhi_epi32(p[0], p[1]), out + 2 * stride, stride);
  }
}

/* Eight blocks at once: 2 rows of each of the first four lie in the lower halves. */
__attribute__((target("avx2"))) void pl_idct_to_2_avx2(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out,
                                                       ptrdiff_t stride) {
  const __m256i rows_apart = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15));
  for (int i = 0; i < n; i += 8, blocks += 512, out += 16) {
    __m256i v[8], rows[8], columns[2];
    for (int block = 0; block < 4; block++) {
      load(blocks + 64 * block, 4, quant, v);
      transform_to_2(v, PL_COLUMN_BIAS(2), PL_COLUMN_SHIFT(2), rows + 2 * block);
    }
    transpose(rows);
    transform_to_2(rows, PL_ROW_BIAS(2), PL_ROW_SHIFT(2), columns);
    store_two_rows(_mm256_shuffle_epi8(_mm256_packus_epi16(columns[0], columns[1]), rows_apart), out, stride);
  }
}

#endif
