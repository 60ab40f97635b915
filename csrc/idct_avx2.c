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

/* a x 2^13: a in the upper half of 32 bits, shifted down. */
AVX2 wide scaled(__m256i a) {
  wide upper = pairs(_mm256_setzero_si256(), a);
  return (wide){_mm256_srai_epi32(upper.low, 16 - PL_FIXED_BITS), _mm256_srai_epi32(upper.high, 16 - PL_FIXED_BITS)};
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
  wide tmp0 = scaled(_mm256_add_epi16(v[0], v[4]));
  wide tmp1 = scaled(_mm256_sub_epi16(v[0], v[4]));
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

__attribute__((target("avx2"))) void pl_idct_avx2(const int16_t *blocks, const int16_t *quant, int n, uint8_t *out,
                                                  ptrdiff_t stride) {
  for (int i = 0; i < n; i += 2, blocks += 128, out += 16) {
    __m256i v[8];
    for (int y = 0; y < 8; y++) {
      __m256i factors = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(quant + 8 * y)));
      __m256i both = _mm256_loadu2_m128i((const __m128i *)(blocks + 64 + 8 * y), (const __m128i *)(blocks + 8 * y));
      v[y] = _mm256_mullo_epi16(both, factors);
    }
    transform(v, PL_COLUMN_BIAS, PL_COLUMN_SHIFT);
    transpose(v);
    transform(v, PL_ROW_BIAS, PL_ROW_SHIFT);
    store_transposed(v, out, stride);
  }
}

#endif
