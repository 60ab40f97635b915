/* Upsampling and colors for every processor. */
#include "rows.h"

static void blend(const uint8_t *near, const uint8_t *far, size_t n, unsigned bias, uint8_t *out) {
  pl_blend(near, far, n, bias, out);
}

static void widen(const uint8_t *row, size_t n, uint8_t *out) { pl_widen(row, n, out); }

static void widen_blended(const uint8_t *near, const uint8_t *far, size_t n, uint16_t *sums, uint8_t *out) {
  pl_widen_blended(near, far, n, sums, out);
}

static void to_rgb(const uint8_t *luma, const uint8_t *blue, const uint8_t *red, size_t n, uint8_t *out) {
  pl_to_rgb(luma, blue, red, n, out);
}

static void to_grey(const uint8_t *rgb, size_t n, uint8_t *out) { pl_to_grey(rgb, n, out); }

const pl_row_functions pl_rows_scalar = {
    .blend = blend, .widen = widen, .widen_blended = widen_blended, .to_rgb = to_rgb, .to_grey = to_grey};

