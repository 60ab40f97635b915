/* Shifted and mirrored rows with AVX2, the same bits as move.c: a row of a small image is one permutation of bytes. */
#include "move.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define HALF 16
#define NOWHERE 0x80 /* what makes a byte shuffle give zero */

/* Which byte of a source row's first and of its last HALF columns each output byte is: output columns 0..15 in the
 * lower lane, the last HALF columns in the upper one. Both overlap where a row is shorter than two halves. */
typedef struct {
  uint8_t of_first[2 * HALF], of_last[2 * HALF];
} permutation;

static void find_permutation(const pl_motion *motion, permutation *found) {
  const int width = motion->columns.length;
  for (int i = 0; i < 2 * HALF; i++) {
    int x = i < HALF ? i : i - 2 * HALF + width;
    int source = pl_source_of(&motion->columns, motion->flip ? width - 1 - x : x);
    found->of_first[i] = source >= 0 && source < HALF ? (uint8_t)source : NOWHERE;
    found->of_last[i] = source >= HALF ? (uint8_t)(source - (width - HALF)) : NOWHERE;
  }
}

__attribute__((target("avx2"))) void pl_move_narrow_avx2(const uint8_t *image, const pl_motion *motion, uint8_t *out) {
  permutation places;
  find_permutation(motion, &places);
  const __m256i of_first = _mm256_loadu_si256((const __m256i *)places.of_first);
  const __m256i of_last = _mm256_loadu_si256((const __m256i *)places.of_last);
  const int height = motion->rows.length;
  const size_t width = (size_t)motion->columns.length;
  for (int channel = 0; channel < motion->channels; channel++) {
    for (int y = 0; y < height; y++, out += width) {
      int row = pl_source_of(&motion->rows, y);
      if (row < 0) {
        memset(out, 0, width);
        continue;
      }
      const uint8_t *source = image + (size_t)row * width;
      __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)source));
      __m256i last = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(source + width - HALF)));
      __m256i moved = _mm256_or_si256(_mm256_shuffle_epi8(first, of_first), _mm256_shuffle_epi8(last, of_last));
      _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(moved));
      _mm_storeu_si128((__m128i *)(out + width - HALF), _mm256_extracti128_si256(moved, 1));
    }
    image += (size_t)height * width;
  }
}

__attribute__((target("avx2"))) void pl_reverse_avx2(const uint8_t *source, size_t count, uint8_t *out) {
  const __m256i backwards = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  size_t done = 0;
  for (; count - done >= 2 * HALF; done += 2 * HALF) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)(source + (count - done - 2 * HALF)));
    bytes = _mm256_shuffle_epi8(bytes, backwards);
    _mm256_storeu_si256((__m256i *)(out + done), _mm256_permute2x128_si256(bytes, bytes, 1));
  }
  for (; done < count; done++) out[done] = source[count - 1 - done];
}

#else
typedef int no_avx2_here; /* C wants a translation unit to declare something */
#endif
