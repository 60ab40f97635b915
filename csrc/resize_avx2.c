/* Eight rows of a plane resized with AVX2, the same bits as resize.c: two taps a multiply-and-add of 16 bits. */
#include "resize.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define BLOCK 32 /* columns of a register */
#define HALF (PL_ROWS / 2)
#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2")))

AVX2_INLINE __m256i weight_pair(const int16_t *weights) {
  int32_t both;
  memcpy(&both, weights, sizeof both);
  return _mm256_set1_epi32(both);
}

/* BLOCK columns of a row, as the instructions leave them: columns 0..7 and 16..23; 8..15 and 24..31. */
typedef struct {
  __m256i even_eights, odd_eights;
} row_block;

AVX2_INLINE row_block sum_down(const uint8_t *source, ptrdiff_t stride, const int16_t *weights, int num_pairs) {
  const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(PL_DOWN_HALF);
  __m256i sum0 = half, sum1 = half, sum2 = half, sum3 = half;
  for (int pair = 0; pair < num_pairs; pair++, source += 2 * stride) {
    const __m256i weight = weight_pair(weights + 2 * pair);
    const __m256i upper = _mm256_loadu_si256((const __m256i *)source);
    const __m256i lower = _mm256_loadu_si256((const __m256i *)(source + stride));
    const __m256i even = _mm256_unpacklo_epi8(upper, lower), odd = _mm256_unpackhi_epi8(upper, lower);
    sum0 = _mm256_add_epi32(sum0, _mm256_madd_epi16(_mm256_unpacklo_epi8(even, zero), weight));
    sum1 = _mm256_add_epi32(sum1, _mm256_madd_epi16(_mm256_unpackhi_epi8(even, zero), weight));
    sum2 = _mm256_add_epi32(sum2, _mm256_madd_epi16(_mm256_unpacklo_epi8(odd, zero), weight));
    sum3 = _mm256_add_epi32(sum3, _mm256_madd_epi16(_mm256_unpackhi_epi8(odd, zero), weight));
  }
  sum0 = _mm256_srai_epi32(sum0, PL_DOWN_BITS), sum1 = _mm256_srai_epi32(sum1, PL_DOWN_BITS);
  sum2 = _mm256_srai_epi32(sum2, PL_DOWN_BITS), sum3 = _mm256_srai_epi32(sum3, PL_DOWN_BITS);
  return (row_block){_mm256_packs_epi32(sum0, sum1), _mm256_packs_epi32(sum2, sum3)};
}

AVX2_INLINE void store_pair(__m256i rows, int16_t *strip, int pair) {
  _mm_storeu_si128((__m128i *)(strip + pair * 2 * PL_ROWS), _mm256_castsi256_si128(rows));
  _mm_storeu_si128((__m128i *)(strip + (pair + BLOCK / 4) * 2 * PL_ROWS), _mm256_extracti128_si256(rows, 1));
}

/* Write four rows of 16 columns, two adjacent columns of a row together: the pairs from `pair` on, and those half a
 * block further. */
AVX2_INLINE void store_half(__m256i row0, __m256i row1, __m256i row2, __m256i row3, int16_t *strip, int pair) {
  const __m256i low01 = _mm256_unpacklo_epi32(row0, row1), high01 = _mm256_unpackhi_epi32(row0, row1);
  const __m256i low23 = _mm256_unpacklo_epi32(row2, row3), high23 = _mm256_unpackhi_epi32(row2, row3);
  store_pair(_mm256_unpacklo_epi64(low01, low23), strip, pair);
  store_pair(_mm256_unpackhi_epi64(low01, low23), strip, pair + 1);
  store_pair(_mm256_unpacklo_epi64(high01, high23), strip, pair + 2);
  store_pair(_mm256_unpackhi_epi64(high01, high23), strip, pair + 3);
}

AVX2_INLINE void resize_down(const pl_plane *plane, const pl_taps *down, int y, int first, int num_columns,
                             int num_pairs, int16_t *strip) {
  const uint8_t *sources[PL_ROWS];
  const int16_t *weights[PL_ROWS];
  for (int row = 0; row < PL_ROWS; row++) {
    const int i = pl_row_of(down, y, row);
    sources[row] = plane->data + down->starts[i] * plane->stride + first;
    weights[row] = down->weights + (ptrdiff_t)i * down->num_taps;
  }
  for (int x = 0; x < num_columns; x += BLOCK, strip += BLOCK * PL_ROWS) {
    for (int row = 0; row < PL_ROWS; row += HALF) { /* eight rows at once would not fit the registers */
      row_block rows[HALF];
      for (int i = 0; i < HALF; i++) {
        rows[i] = sum_down(sources[row + i] + x, plane->stride, weights[row + i], num_pairs);
      }
      int16_t *half = strip + 2 * row;
      store_half(rows[0].even_eights, rows[1].even_eights, rows[2].even_eights, rows[3].even_eights, half, 0);
      store_half(rows[0].odd_eights, rows[1].odd_eights, rows[2].odd_eights, rows[3].odd_eights, half, BLOCK / 8);
    }
  }
}

AVX2_INLINE __m256i sum_across(const pl_taps *across, int i, int num_pairs, const int16_t *strip) {
  const int16_t *columns = strip + (ptrdiff_t)(across->starts[i] - across->starts[0]) * PL_ROWS;
  const int16_t *weights = across->weights + (ptrdiff_t)i * across->num_taps;
  __m256i sum = _mm256_set1_epi32(PL_ACROSS_HALF);
  for (int pair = 0; pair < num_pairs; pair++) {
    const __m256i samples = _mm256_loadu_si256((const __m256i *)(columns + pair * 2 * PL_ROWS));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(samples, weight_pair(weights + 2 * pair)));
  }
  return _mm256_srai_epi32(sum, PL_ACROSS_BITS);
}

/* Two outputs at a time: the last of an odd number is written twice, the second time behind the end. */
AVX2_INLINE void resize_across(const pl_taps *across, int num_pairs, const int16_t *strip, int16_t *columns) {
  for (int i = 0; i < across->size; i += 2) {
    const int next = i + 1 < across->size ? i + 1 : i;
    const __m256i left = sum_across(across, i, num_pairs, strip), right = sum_across(across, next, num_pairs, strip);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(left, right), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i *)(columns + (ptrdiff_t)i * PL_ROWS), both);
  }
}

/* A loop of a known length is unrolled, its weights kept in registers: these lengths cover reductions to a third. */
AVX2 void pl_resize_rows_avx2(const pl_plane *plane, const pl_taps *down, const pl_taps *across, int y, int16_t *strip,
                              int16_t *columns) {
  const int first = across->starts[0], num_columns = pl_strip_columns(across);
  const int down_pairs = down->num_taps / 2, across_pairs = across->num_taps / 2;
  switch (down_pairs) {
    case 1: resize_down(plane, down, y, first, num_columns, 1, strip); break;
    case 2: resize_down(plane, down, y, first, num_columns, 2, strip); break;
    case 3: resize_down(plane, down, y, first, num_columns, 3, strip); break;
    default: resize_down(plane, down, y, first, num_columns, down_pairs, strip); break;
  }
  switch (across_pairs) {
    case 1: resize_across(across, 1, strip, columns); break;
    case 2: resize_across(across, 2, strip, columns); break;
    case 3: resize_across(across, 3, strip, columns); break;
    default: resize_across(across, across_pairs, strip, columns); break;
  }
}

#else
typedef int no_avx2_here; /* C wants a translation unit to declare something */
#endif
