/* Upsampling compiled for AVX2, and colors with AVX2 by hand: compilers do not find how to interleave by threes. */
#include "rows.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE_AVX2 static inline __attribute__((always_inline, target("avx2")))
#define STEP 16 /* pixels at once */

AVX2 static void blend(const uint8_t *near, const uint8_t *far, size_t n, unsigned bias, uint8_t *out) {
  pl_blend(near, far, n, bias, out);
}

AVX2 static void widen(const uint8_t *row, size_t n, uint8_t *out) { pl_widen(row, n, out); }

AVX2 static void widen_blended(const uint8_t *near, const uint8_t *far, size_t n, uint16_t *sums, uint8_t *out) {
  pl_widen_blended(near, far, n, sums, out);
}

INLINE_AVX2 __m256i widened(const uint8_t *samples) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)samples));
}

/* value x factor / 2^16, to the nearest. Upper halves of products are rounded down, so they get one bit more first. */
INLINE_AVX2 __m256i times(__m256i value, int factor) {
  __m256i doubled = _mm256_mulhi_epi16(_mm256_add_epi16(value, value), _mm256_set1_epi16((short)factor));
  return _mm256_srai_epi16(_mm256_add_epi16(doubled, _mm256_set1_epi16(1)), 1);
}

/* (a x factor_a + b x factor_b) / 2^16, to the nearest. */
INLINE_AVX2 __m256i weighted(__m256i a, __m256i b, int factor_a, int factor_b) {
  const __m256i factors = _mm256_set1_epi32((int)((uint32_t)(uint16_t)factor_a | (uint32_t)factor_b << 16));
  const __m256i half = _mm256_set1_epi32(1 << 15);
  __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), factors);
  __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), factors);
  return _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(low, half), 16),
                            _mm256_srai_epi32(_mm256_add_epi32(high, half), 16));
}

INLINE_AVX2 __m128i narrowed(__m256i value) {
  return _mm_packus_epi16(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
}

/* Write the bytes of three registers in turn. A shuffle puts zero where its index is negative. */
INLINE_AVX2 void store_interleaved(__m128i r, __m128i g, __m128i b, uint8_t *out) {
  const __m128i r0 = _mm_setr_epi8(0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1, 5);
  const __m128i g0 = _mm_setr_epi8(-1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1);
  const __m128i b0 = _mm_setr_epi8(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1);
  const __m128i r1 = _mm_setr_epi8(-1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10, -1);
  const __m128i g1 = _mm_setr_epi8(5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10);
  const __m128i b1 = _mm_setr_epi8(-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1);
  const __m128i r2 = _mm_setr_epi8(-1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1, -1);
  const __m128i g2 = _mm_setr_epi8(-1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1);
  const __m128i b2 = _mm_setr_epi8(10, -1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15);
  __m128i *to = (__m128i *)out;
  _mm_storeu_si128(to, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r0), _mm_shuffle_epi8(g, g0)),
                                    _mm_shuffle_epi8(b, b0)));
  _mm_storeu_si128(to + 1, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r1), _mm_shuffle_epi8(g, g1)),
                                        _mm_shuffle_epi8(b, b1)));
  _mm_storeu_si128(to + 2, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r2), _mm_shuffle_epi8(g, g2)),
                                        _mm_shuffle_epi8(b, b2)));
}

/* Factors as in rows.h, less the whole numbers that 16 bits cannot hold: 91881 = 65536 + 26345, and so on. */
AVX2 static void to_rgb(const uint8_t *luma, const uint8_t *blue, const uint8_t *red, size_t n, uint8_t *out) {
  const __m256i centre = _mm256_set1_epi16(128);
  size_t i = 0;
  for (; i + STEP <= n; i += STEP) {
    __m256i y = widened(luma + i);
    __m256i cb = _mm256_sub_epi16(widened(blue + i), centre), cr = _mm256_sub_epi16(widened(red + i), centre);
    __m256i r = _mm256_add_epi16(_mm256_add_epi16(y, cr), times(cr, 91881 - 65536));
    __m256i g = _mm256_add_epi16(_mm256_sub_epi16(y, cr), weighted(cb, cr, -22554, 65536 - 46802));
    __m256i b = _mm256_add_epi16(_mm256_add_epi16(y, _mm256_add_epi16(cb, cb)), times(cb, 116130 - 2 * 65536));
    store_interleaved(narrowed(r), narrowed(g), narrowed(b), out + 3 * i);
  }
  pl_to_rgb(luma + i, blue + i, red + i, n - i, out + 3 * i);
}

AVX2 static void to_grey(const uint8_t *rgb, size_t n, uint8_t *out) { pl_to_grey(rgb, n, out); }

const pl_row_functions pl_rows_avx2 = {
    .blend = blend, .widen = widen, .widen_blended = widen_blended, .to_rgb = to_rgb, .to_grey = to_grey};

#endif
