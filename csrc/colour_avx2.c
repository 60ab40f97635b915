/* Colors with AVX2, the same bits as colour.c: no sum leaves 16 bits before it is clipped (resize.h). */
#include "colour.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define LANES 16 /* samples of a register */
#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2")))

AVX2_INLINE __m256i load(const int16_t *samples) { return _mm256_loadu_si256((const __m256i *)samples); }

AVX2_INLINE __m256i scaled(__m256i samples, int factor) {
  return _mm256_mulhrs_epi16(samples, _mm256_set1_epi16((int16_t)factor));
}

AVX2_INLINE __m256i level(__m256i value) {
  return _mm256_srai_epi16(_mm256_add_epi16(value, _mm256_set1_epi16(PL_COLOUR_HALF)), PL_FRACTION_BITS);
}

AVX2_INLINE void store(__m256i first, __m256i second, uint8_t *out) {
  const __m256i levels = _mm256_packus_epi16(first, second);
  _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64(levels, _MM_SHUFFLE(3, 1, 2, 0)));
}

typedef struct {
  __m256i red, green, blue;
} colours;

AVX2_INLINE colours colours_of(const int16_t *const ycc[3], size_t i) {
  const __m256i grey = _mm256_set1_epi16(PL_GREY_CHROMA), luma = load(ycc[0] + i);
  const __m256i blue = _mm256_sub_epi16(load(ycc[1] + i), grey), red = _mm256_sub_epi16(load(ycc[2] + i), grey);
  const __m256i of_red = _mm256_add_epi16(red, scaled(red, PL_RED_OF_CR));
  const __m256i of_green = _mm256_sub_epi16(
      _mm256_add_epi16(scaled(blue, PL_GREEN_OF_CB), scaled(red, PL_GREEN_OF_CR)), red);
  const __m256i of_blue = _mm256_add_epi16(_mm256_add_epi16(blue, blue), scaled(blue, PL_BLUE_OF_CB));
  return (colours){level(_mm256_add_epi16(luma, of_red)), level(_mm256_add_epi16(luma, of_green)),
                   level(_mm256_add_epi16(luma, of_blue))};
}

AVX2 void pl_to_rgb_avx2(const int16_t *const ycc[3], size_t num_samples, uint8_t *const rgb[3]) {
  for (size_t i = 0; i < num_samples; i += 2 * LANES) {
    const colours first = colours_of(ycc, i), second = colours_of(ycc, i + LANES);
    store(first.red, second.red, rgb[0] + i);
    store(first.green, second.green, rgb[1] + i);
    store(first.blue, second.blue, rgb[2] + i);
  }
}

AVX2 void pl_to_grey_avx2(const int16_t *luma, size_t num_samples, uint8_t *grey) {
  for (size_t i = 0; i < num_samples; i += 2 * LANES) {
    store(level(load(luma + i)), level(load(luma + i + LANES)), grey + i);
  }
}

#else
typedef int no_avx2_here; /* C wants a translation unit to declare something */
#endif
