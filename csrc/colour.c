/* Colors in plain C: what every other version must equal bit for bit. */
#include "colour.h"

/* Return sample * factor / (1 << PL_FACTOR_BITS), rounded: what AVX2's mulhrs and NEON's vqrdmulh do. */
static int scaled(int sample, int factor) { return (((sample * factor) >> (PL_FACTOR_BITS - 1)) + 1) >> 1; }

static uint8_t rounded(int value) {
  int level = (value + PL_COLOUR_HALF) >> PL_FRACTION_BITS;
  return (uint8_t)(level < 0 ? 0 : level > 255 ? 255 : level);
}

void pl_to_rgb_scalar(const int16_t *const ycc[3], size_t num_samples, uint8_t *const rgb[3]) {
  for (size_t i = 0; i < num_samples; i++) {
    const int luma = ycc[0][i], blue = ycc[1][i] - PL_GREY_CHROMA, red = ycc[2][i] - PL_GREY_CHROMA;
    rgb[0][i] = rounded(luma + red + scaled(red, PL_RED_OF_CR));
    rgb[1][i] = rounded(luma + scaled(blue, PL_GREEN_OF_CB) + scaled(red, PL_GREEN_OF_CR) - red);
    rgb[2][i] = rounded(luma + 2 * blue + scaled(blue, PL_BLUE_OF_CB));
  }
}

void pl_to_grey_scalar(const int16_t *luma, size_t num_samples, uint8_t *grey) {
  for (size_t i = 0; i < num_samples; i++) grey[i] = rounded(luma[i]);
}
