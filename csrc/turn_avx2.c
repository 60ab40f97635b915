/* Writing eight rows of samples in their direction with AVX2: sixteen columns of them transposed in registers. */
#include "turn.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define BLOCK 16 /* columns */
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2")))

/* Load columns 2 * i and 2 * i + 1 to the lower lane, those eight further to the upper one; a row's two adjacent. */
AVX2_INLINE __m256i load_pairs(const uint8_t *columns, int i) {
  const __m256i adjacent = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  const __m128i left = _mm_loadu_si128((const __m128i *)(columns + i * 2 * PL_ROWS));
  const __m128i right = _mm_loadu_si128((const __m128i *)(columns + (i * 2 + BLOCK / 2) * PL_ROWS));
  return _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(left), right, 1), adjacent);
}

/* Two rows of BLOCK columns, one a lane. */
AVX2_INLINE __m256i two_rows(__m256i eights, int reversed) {
  const __m256i backwards = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  const __m256i rows = _mm256_permute4x64_epi64(eights, _MM_SHUFFLE(3, 1, 2, 0));
  return reversed ? _mm256_shuffle_epi8(rows, backwards) : rows;
}

AVX2_INLINE void transpose(const uint8_t *columns, int reversed, __m256i rows[PL_ROWS / 2]) {
  const __m256i pair0 = load_pairs(columns, 0), pair1 = load_pairs(columns, 1);
  const __m256i pair2 = load_pairs(columns, 2), pair3 = load_pairs(columns, 3);
  const __m256i low01 = _mm256_unpacklo_epi16(pair0, pair1), high01 = _mm256_unpackhi_epi16(pair0, pair1);
  const __m256i low23 = _mm256_unpacklo_epi16(pair2, pair3), high23 = _mm256_unpackhi_epi16(pair2, pair3);
  rows[0] = two_rows(_mm256_unpacklo_epi32(low01, low23), reversed);
  rows[1] = two_rows(_mm256_unpackhi_epi32(low01, low23), reversed);
  rows[2] = two_rows(_mm256_unpacklo_epi32(high01, high23), reversed);
  rows[3] = two_rows(_mm256_unpackhi_epi32(high01, high23), reversed);
}

/* Write BLOCK columns from `columns` on, those of row 0 to `out`. */
AVX2_INLINE void write_block(const uint8_t *columns, int reversed, int num_rows, ptrdiff_t stride, uint8_t *out) {
  __m256i rows[PL_ROWS / 2];
  transpose(columns, reversed, rows);
  for (int row = 0; row < num_rows; row++, out += stride) {
    const __m256i both = rows[row / 2];
    _mm_storeu_si128((__m128i *)out, row % 2 ? _mm256_extracti128_si256(both, 1) : _mm256_castsi256_si128(both));
  }
}

/* The last block ends with the last column: where that is no multiple, it overlaps the one before. */
AVX2_INLINE void write_blocks(const uint8_t *columns, int size, int num_rows, pl_turn turn, uint8_t *out) {
  const ptrdiff_t stride = turn.reverse_rows ? -(ptrdiff_t)size : size;
  for (int step = 0; step < size; step += BLOCK) {
    const int x = step + BLOCK <= size ? step : size - BLOCK;
    const int to = turn.reverse_columns ? size - BLOCK - x : x;
    write_block(columns + (ptrdiff_t)x * PL_ROWS, turn.reverse_columns, num_rows, stride, out + to);
  }
}

__attribute__((target("avx2"))) void pl_write_rows_avx2(const uint8_t *columns, int size, int y, pl_turn turn,
                                                        uint8_t *out) {
  if (turn.transposed || size < BLOCK) { /* columns are pieces of output rows already, or there are few */
    pl_write_rows_scalar(columns, size, y, turn, out);
    return;
  }
  out += (ptrdiff_t)(turn.reverse_rows ? size - 1 - y : y) * size;
  if (size - y >= PL_ROWS) {
    write_blocks(columns, size, PL_ROWS, turn, out);
  } else {
    write_blocks(columns, size, size - y, turn, out);
  }
}

#else
typedef int no_avx2_here; /* C wants a translation unit to declare something */
#endif
